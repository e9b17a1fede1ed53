-- Notes the images that a job will need in its admin comment, while it is submitted:
--
--     stage-seen=/lustre/alice/img.sqsh,/lustre/alice/two%20words.sqsh
--
-- In your own job_submit.lua (JobSubmitPlugins=lua, beside slurm.conf):
--
--     local found, note_images = pcall(dofile, "/usr/share/forestage/slurm/job_submit.lua")
--
--     function slurm_job_submit(job_desc, part_list, submit_uid)
--         if found then note_images(job_desc) end
--         …
--
-- This file defines no global name and returns that one function. It never fails, never refuses a
-- job, and changes nothing else: the user's comment stays, what the admin comment holds stays.
-- slurmctld holds a lock meanwhile, so each loop has a bound and each search is a plain one: a
-- lazy pattern took 2.8 s on a script of 40 kB. Lua 5.1 to 5.4.

local OPTION = "_SLURM_SPANK_OPTION_pyxis_container_image="
local FLAG = "--container-image="
local WORD = "stage-seen="

local MAX_WORD = 900 -- bytes of the whole word; what does not fit is left out
local MAX_IMAGES = 16 -- as for a comment (forestage.slurm.hints)
local MAX_SCRIPT = 256 * 1024 -- bytes that are searched
local MAX_FLAGS = 64 -- places in a script that are looked at
local MAX_BEFORE = 1024 -- bytes before a flag in which its srun stands
local MAX_LINES = 64 -- lines before it that end in a backslash
local MAX_PATH = 800 -- bytes
local MAX_OPTIONS = 1024 -- of all plugins; a client other than Slurm's own may send any number
local NO_VAL = 0xfffffffe -- Slurm's word for a number that was not given

local char, find, format, gsub = string.char, string.find, string.format, string.gsub
local match, reverse, sub = string.match, string.reverse, string.sub

-- A path from / on, or nil for what is none: an image of a registry.
local function absolute(value, work_dir)
    if #value > MAX_PATH then
        return nil
    end
    if sub(value, 1, 1) == "/" then
        return value
    end
    if sub(value, 1, 1) == "." and work_dir and #work_dir <= MAX_PATH then
        return work_dir .. "/" .. gsub(value, "^%./", "")
    end
    return nil
end

-- What stands before a flag on its line, and on those before it that end in a backslash.
local function line_before(script, flag)
    local text = sub(script, math.max(1, flag - MAX_BEFORE), flag - 1)
    local backwards, from = reverse(text), 1
    for _ = 1, MAX_LINES do
        local newline = find(backwards, "\n", from, true)
        if not newline then
            return text
        end
        if sub(backwards, newline + 1, newline + 1) ~= "\\" then
            return sub(text, #text - newline + 2)
        end
        from = newline + 1
    end
    return ""
end

-- The value of a flag whose `=` is at `at`; "" for one that only a shell can tell.
local function value_at(script, at)
    local rest = sub(script, at + 1, at + 1 + MAX_PATH) -- one byte more than a path may have
    local quote, value = match(rest, "^[\"']"), nil
    if quote then
        value = sub(rest, 2, (find(rest, quote, 2, true) or 2) - 1)
    else
        value = match(rest, "^[^%s;|&<>()]*")
    end
    return find(value, "[$`\"'\\*?%[{~]") and "" or value
end

-- Calls add(value) for each `srun … --container-image=value` of a script.
local function in_script(script, add)
    local head, from = sub(script, 1, MAX_SCRIPT), 1
    for _ = 1, MAX_FLAGS do
        local first, last = find(head, FLAG, from, true)
        if not first then
            return
        end
        local line = " " .. line_before(script, first)
        if not find(line, "^%s*#") and find(line, "[%s/;|&(`]srun%s") then
            add(value_at(script, last))
        end
        from = last + 1
    end
end

-- A table is four times as fast as a function that formats each byte.
local PERCENT = {}
for code = 0, 255 do
    PERCENT[char(code)] = format("%%%02X", code)
end

local function note(job_desc)
    local offset = job_desc.het_job_offset
    if offset and offset > 0 and offset < NO_VAL then
        return -- its options are the first component's
    end
    local before = job_desc.admin_comment or ""
    if find(before, WORD, 1, true) then
        return
    end
    local known, seen, paths, length = {}, 0, {}, #WORD
    local function add(value)
        local path = absolute(value, job_desc.work_dir)
        if not path or known[path] or seen == MAX_IMAGES then
            return
        end
        known[path], seen = true, seen + 1
        local encoded = gsub(path, "[^A-Za-z0-9/._~-]", PERCENT)
        if length + #encoded + 1 <= MAX_WORD then
            paths[#paths + 1] = encoded
            length = length + #encoded + 1
        end
    end
    if (job_desc.spank_job_env_size or 0) <= MAX_OPTIONS then
        for _, option in pairs(job_desc.spank_job_env or {}) do
            if sub(option, 1, #OPTION) == OPTION then
                add(sub(option, #OPTION + 1))
            end
        end
    end
    in_script(job_desc.script or "", add)
    if #paths > 0 then
        local word = WORD .. table.concat(paths, ",")
        job_desc.admin_comment = before == "" and word or before .. " " .. word
    end
end

return function(job_desc)
    local done, problem = pcall(note, job_desc)
    if not done and slurm then
        pcall(slurm.log_error, "forestage: no image is noted for a job: %s", tostring(problem))
    end
end
