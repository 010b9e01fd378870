-- For slurmctld (JobSubmitPlugins=lua). It does two things, and neither is needed everywhere.
--
-- Slurm keeps the value of its own --container with the job and does not show it to plugins on the node. The commands with mizzen
-- hand it on; where a batch job comes from elsewhere (the REST interface, programs that call Slurm's library, a login node
-- without the plugin), this does.
--
-- A node that does not load the plugin runs a job with a container as if none was asked for. Where some nodes have mizzen and
-- others not (yet), give those that have it a feature in slurm.conf (NodeName=... Feature=mizzen), and name it here: jobs with
-- a container then go to these nodes alone.
local FEATURE = nil -- "mizzen"

-- What the commands with mizzen say of this job: "yes" or "no"; nil where it comes from elsewhere. The environment tells less: it
-- may be that of another job.
local function said_by_mizzen(job_desc)
    for _, variable in pairs(job_desc.spank_job_env or {}) do
        local said = string.match(variable, "MIZZEN_CONTAINER=(%a+)$")
        if said then
            return said
        end
    end
end

local function wants_container(job_desc)
    local said = said_by_mizzen(job_desc)
    if said then
        return said == "yes"
    end
    local environment = job_desc.environment or {}
    return job_desc.container or environment.SLURM_MIZZEN_REQUEST or environment.SLURM_CONTAINER
        or environment.MIZZEN_CONTAINER or environment.MIZZEN_CONTAINER_IMAGE
        or environment.MIZZEN_ENVIRONMENT or environment.MIZZEN_EDF
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.container and job_desc.script and not said_by_mizzen(job_desc) then
        job_desc.environment.SLURM_CONTAINER = job_desc.container
    end
    if FEATURE and wants_container(job_desc) then
        local others = job_desc.features or ""
        if others == "" then
            job_desc.features = FEATURE
        elseif not string.find(others, "[^%w_.&-]") then
            job_desc.features = others .. "&" .. FEATURE
        elseif not string.find(others, FEATURE, 1, true) then
            -- What & would belong to in an expression with | or brackets differs between releases.
            slurm.log_user("a job with a container needs the feature " .. FEATURE .. "; write it into --constraint")
            return slurm.ERROR
        end
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end
