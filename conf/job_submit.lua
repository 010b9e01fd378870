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

local function wants_container(job_desc)
    local environment = job_desc.environment or {}
    if job_desc.container or environment.SLURM_MIZZEN_REQUEST or environment.SLURM_SPANK_MIZZEN_REQUEST
        or environment.MIZZEN_CONTAINER or environment.MIZZEN_CONTAINER_IMAGE then
        return true
    end
    for _, variable in pairs(job_desc.spank_job_env or {}) do
        if string.find(variable, "MIZZEN_CONTAINER=", 1, true) then
            return true
        end
    end
    return false
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.container and job_desc.script then
        local environment = job_desc.environment
        if not environment.SLURM_MIZZEN_REQUEST and not environment.SLURM_SPANK_MIZZEN_REQUEST then
            environment.SLURM_CONTAINER = job_desc.container
        end
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
