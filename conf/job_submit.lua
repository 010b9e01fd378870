-- For slurmctld (JobSubmitPlugins=lua). Slurm keeps the value of its own --container with the job and does not show it to
-- plugins on the node. The commands with mizzen hand it on; where a batch job comes from elsewhere (the REST interface,
-- programs that call Slurm's library, a login node without the plugin), this does. Not needed otherwise.

function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.container and job_desc.script then
        local environment = job_desc.environment
        if not environment.SLURM_MIZZEN_REQUEST and not environment.SLURM_SPANK_MIZZEN_REQUEST then
            environment.SLURM_CONTAINER = job_desc.container
        end
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end
