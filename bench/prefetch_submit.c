/* Submits batch jobs with a comment each: prefetch_submit COUNT UID NODES. By slurmctld's own
 * interface, as 10,000 times sbatch takes minutes. */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	char *environment[] = {"PATH=/usr/bin:/bin", NULL};
	char comment[64], name[16];

	if (argc != 4)
		return 2;
	slurm_init(NULL);
	for (int job_index = 0; job_index < atoi(argv[1]); job_index++) {
		submit_response_msg_t *response = NULL;
		job_desc_msg_t job;

		slurm_init_job_desc_msg(&job);
		snprintf(comment, sizeof(comment), "stage=/shared/alice/%d.sqsh", job_index);
		snprintf(name, sizeof(name), "job%d", job_index);
		job.name = name;
		job.comment = comment;
		job.user_id = job.group_id = atoi(argv[2]);
		job.min_nodes = 1 + job_index % atoi(argv[3]);
		job.time_limit = 10 + job_index % 1000;
		job.shared = 0;
		job.work_dir = "/";
		job.std_out = "/dev/null";
		job.environment = environment;
		job.env_size = 1;
		job.script = "#!/bin/sh\n";
		if (slurm_submit_batch_job(&job, &response)) {
			slurm_perror("slurm_submit_batch_job");
			return 1;
		}
		slurm_free_submit_response_response_msg(response);
	}
	return 0;
}
