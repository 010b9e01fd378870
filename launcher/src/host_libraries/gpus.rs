//! Whether a container gets the node's GPUs: what the user asks for, and what Slurm has given to the step.

use std::ffi::OsString;

use mizzen_core::settings::Gpu;

/// Slurm's variables of a step or job that has GPUs, and those of the vendors that it sets in every task.
const VARIABLES: [&str; 6] = [
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
];

/// Decides it, with the reason.
pub fn wanted(setting: Gpu, environment: &[(OsString, OsString)]) -> (bool, String) {
    let variable = |name: &str| {
        let found = environment.iter().find(|(known, _)| known == name);
        found.and_then(|(_, value)| value.to_str()).filter(|value| !value.is_empty())
    };
    match setting {
        Gpu::None => return (false, "gpu=none".to_owned()),
        Gpu::All => return (true, "gpu=all".to_owned()),
        Gpu::Auto => {}
    }
    // Set by slurmd for everything that it starts.
    if variable("SLURMD_NODENAME").is_none() {
        return (true, "gpu=auto, not in a Slurm job".to_owned());
    }
    let given = |name: &&&str| variable(name).is_some_and(|value| value != "NoDevFiles" && value != "-1");
    match VARIABLES.iter().find(given) {
        Some(name) => (true, format!("gpu=auto, {name}={}", variable(name).unwrap_or_default())),
        None => (false, "gpu=auto, and Slurm gave no GPU to this step".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_without_gpus_gets_none() {
        let decided = |setting, pairs: &[(&str, &str)]| {
            let environment: Vec<_> = pairs.iter().map(|(name, value)| (name.into(), value.into())).collect();
            wanted(setting, &environment).0
        };
        let step = ("SLURMD_NODENAME", "n1");
        assert!(decided(Gpu::Auto, &[]));
        assert!(!decided(Gpu::Auto, &[step]));
        assert!(decided(Gpu::All, &[step]));
        assert!(!decided(Gpu::None, &[]));
        assert!(decided(Gpu::Auto, &[step, ("SLURM_STEP_GPUS", "0")]));
        assert!(decided(Gpu::Auto, &[step, ("ROCR_VISIBLE_DEVICES", "1")]));
        for value in ["", "NoDevFiles", "-1"] {
            assert!(!decided(Gpu::Auto, &[step, ("CUDA_VISIBLE_DEVICES", value)]), "{value}");
        }
    }
}
