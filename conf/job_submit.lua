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
    -- These ask for nothing when they are empty.
    for _, name in ipairs({"MIZZEN_CONTAINER_NAME", "PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"}) do
        if (environment[name] or "") ~= "" then
            return true
        end
    end
    return job_desc.container or environment.SLURM_MIZZEN_REQUEST or environment.SLURM_CONTAINER
        or environment.MIZZEN_CONTAINER or environment.MIZZEN_CONTAINER_IMAGE
        or environment.MIZZEN_ENVIRONMENT or environment.MIZZEN_EDF
end

local function has_feature(words)
    return string.find("&" .. words .. "&", "&" .. FEATURE .. "&", 1, true)
end

-- Adds the feature to a constraint: "features", which is --constraint, or "prefer", which Slurm tries in the place of the other.
-- Only words with & between them can have it: what & belongs to beside |, counts and brackets differs between releases, and with
-- some of these not all nodes of the job need have it.
local function add_feature(job_desc, field)
    local words = job_desc[field] or ""
    local wanted = words
    if words == "" then
        wanted = FEATURE
    elseif not has_feature(words) then
        wanted = words .. "&" .. FEATURE
    end
    if wanted ~= words and not string.find(words, "[^%w_.&-]") then
        job_desc[field] = wanted
    end
    -- Not every release can change every field.
    if job_desc[field] ~= wanted or string.find(words, "[^%w_.&-]") then
        slurm.log_user("all nodes of a job with a container need the feature " .. FEATURE .. "; write " .. FEATURE
            .. ", and other features with & before it, in place of " .. words)
        return false
    end
    return true
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.container and job_desc.script and not said_by_mizzen(job_desc) then
        job_desc.environment.SLURM_CONTAINER = job_desc.container
    end
    if FEATURE and wants_container(job_desc) then
        local preferred = job_desc.prefer or ""
        if not add_feature(job_desc, "features") or (preferred ~= "" and not add_feature(job_desc, "prefer")) then
            return slurm.ERROR
        end
    end
    return slurm.SUCCESS
end

-- Of a job that waits, the environment is not known any more; the feature tells.
local function has_container(job_rec)
    local said = said_by_mizzen(job_rec)
    if said then
        return said == "yes"
    end
    return job_rec.container or has_feature(job_rec.features or "")
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    if FEATURE and has_container(job_rec) then
        local preferred = job_desc.prefer or ""
        if job_desc.features and not add_feature(job_desc, "features")
            or preferred ~= "" and not add_feature(job_desc, "prefer") then
            return slurm.ERROR
        end
    end
    return slurm.SUCCESS
end
