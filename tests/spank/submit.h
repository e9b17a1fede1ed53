/* What the step manager in little and the submission in little have in common. */
#ifndef SUBMIT_H
#define SUBMIT_H

/* submit.c. As srun, sbatch or salloc, whose context spank_context() says. */
int submit(int argc, char **argv);

/* fake.c. A line of the report. */
void report_fact(const char *format, ...);

#endif
