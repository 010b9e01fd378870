//! Whether a container gets the node's GPUs: what the user asks for, and what Slurm has given to the step.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use mizzen_core::failure::quote;
use mizzen_core::settings::Gpu;
use mizzen_core::{Failure, SlurmConf};
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};

/// Slurm's variables of a step or job that has GPUs, and those of the vendors that it sets in every task. With
/// `--gpu-bind=none` Slurm 22.05 tells no more than their number.
const VARIABLES: [&str; 7] = [
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "SLURM_GPUS_ON_NODE",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
];

/// Decides it, with the reason. `conf` gives slurm.conf, if it can be read.
pub fn wanted(
    setting: Gpu,
    environment: &[(OsString, OsString)],
    conf: impl FnOnce() -> Option<SlurmConf>,
) -> (bool, String) {
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
    let given = |name: &&&str| {
        let none = if **name == "SLURM_GPUS_ON_NODE" { "0" } else { "NoDevFiles" };
        variable(name).is_some_and(|value| value != none && value != "-1")
    };
    match VARIABLES.iter().find(given) {
        Some(name) => (true, format!("gpu=auto, {name}={}", variable(name).unwrap_or_default())),
        None if conf().is_some_and(|conf| !manages_gpus(&conf)) => {
            (true, "gpu=auto, and Slurm does not manage GPUs here".to_owned())
        }
        None => (false, "gpu=auto, and Slurm gave no GPU to this step".to_owned()),
    }
}

/// The GPUs that Slurm has given to the step. `allowed` tells what the device cgroup says of a device.
///
/// No variable tells which these are: with `--gpus-per-task` each task is told of its own alone, and not by the numbers of
/// the devices. Nor does the cgroup, which is then the task's as well. But if it allows as many as the step has on this
/// node, these are it. Otherwise the container, which all tasks share, has all, and each task can open its own.
fn of_step(
    gpus: Vec<PathBuf>,
    setting: Gpu,
    environment: &[(OsString, OsString)],
    allowed: impl Fn(&Path) -> bool,
) -> Vec<PathBuf> {
    let count = environment.iter().find(|(name, _)| name == "SLURM_GPUS_ON_NODE");
    let count = count.and_then(|(_, value)| value.to_str()?.parse::<usize>().ok());
    let Some(count) = count.filter(|_| setting == Gpu::Auto) else { return gpus };
    let own: Vec<PathBuf> = gpus.iter().filter(|gpu| allowed(gpu)).cloned().collect();
    if own.len() == count { own } else { gpus }
}

/// What becomes of a step's GPUs by the word of a variable, as `NVIDIA_VISIBLE_DEVICES` has it for NVIDIA's runtimes and enroot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The container has all of them.
    All,
    /// It has them all, for want of another way: the word names some as only the driver knows them.
    Unknown,
    /// These, counted from 0: as the driver counts the devices that a step can open.
    Numbers(Vec<usize>),
    /// The driver's libraries without a GPU.
    DriverOnly,
    /// Neither.
    Nothing,
}

impl Choice {
    fn parse(value: &str) -> Choice {
        match value {
            "" | "all" => Choice::All,
            "void" => Choice::Nothing,
            "none" => Choice::DriverOnly,
            list => {
                let numbers: Result<Vec<usize>, _> =
                    list.split(',').map(|word| word.trim().parse()).collect();
                numbers.map_or(Choice::Unknown, Choice::Numbers)
            }
        }
    }
}

/// The GPUs that a container gets: those of the step, of which a variable may choose some.
pub struct Chosen<'a> {
    /// What the user or the site says of GPUs.
    pub setting: Gpu,
    /// The step's variables.
    pub environment: &'a [(OsString, OsString)],
    /// The variable that chooses, with its value.
    variable: Option<(&'a str, String)>,
    /// What it says. Outside of a job, and where all GPUs are wanted whatever Slurm says, it does not matter.
    pub choice: Choice,
}

impl Chosen<'_> {
    /// With the variable of the user or the image, if they have it.
    pub fn new<'a>(
        setting: Gpu,
        environment: &'a [(OsString, OsString)],
        variable: Option<(&'a str, String)>,
    ) -> Chosen<'a> {
        let in_step = environment.iter().any(|(name, _)| name == "SLURMD_NODENAME");
        let variable = variable.filter(|_| setting == Gpu::Auto && in_step);
        let choice = variable.as_ref().map_or(Choice::All, |(_, value)| Choice::parse(value));
        Chosen { setting, environment, variable, choice }
    }

    /// The variable as messages show it.
    pub fn text(&self) -> String {
        let shown = |(name, value): &(&str, String)| format!("{name}={}", quote(value.as_bytes()));
        self.variable.as_ref().map(shown).unwrap_or_default()
    }

    /// Those of the node's GPUs that the container gets.
    pub fn among(&self, gpus: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
        let gpus = of_step(gpus, self.setting, self.environment, allowed);
        self.of_those(gpus)
    }

    fn of_those(&self, gpus: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
        let numbers = match &self.choice {
            Choice::All | Choice::Unknown => return Ok(gpus),
            Choice::DriverOnly | Choice::Nothing => return Ok(Vec::new()),
            Choice::Numbers(numbers) => numbers,
        };
        if let Some(missing) = numbers.iter().find(|number| **number >= gpus.len()) {
            let count = gpus.len();
            let message = format!(
                "{}: the step's GPUs on this node are {count}, counted from 0: there is no {missing}",
                self.text()
            );
            let name = self.variable.as_ref().map_or("", |(name, _)| name);
            return Err(Failure::new(message)
                .hint(format!("export {name}=all, for all that Slurm has given to the step")));
        }
        let numbered = gpus.into_iter().enumerate().filter(|(number, _)| numbers.contains(number));
        Ok(numbered.map(|(_, gpu)| gpu).collect())
    }
}

/// What the device cgroup of this process says of a device; without opening it, which would wake up a GPU.
fn allowed(device: &Path) -> bool {
    access(device, AccessFlags::R_OK | AccessFlags::W_OK) != Err(Errno::EPERM)
}

/// Whether a slurm.conf, or a file that it includes, may have GPUs as resources. Elsewhere a job has those of its nodes.
fn manages_gpus(conf: &SlurmConf) -> bool {
    let types = conf.value("GresTypes").unwrap_or_default();
    conf.is_incomplete() || types.split(',').any(|kind| kind.trim() == "gpu")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpus_of_a_step() {
        let gpus: Vec<PathBuf> = (0..4).map(|number| format!("/dev/nvidia{number}").into()).collect();
        let decided = |setting, count: &str, allowed: &[&str]| {
            let environment = [("SLURM_GPUS_ON_NODE".into(), count.into())];
            of_step(gpus.clone(), setting, &environment, |gpu| allowed.iter().any(|name| gpu.ends_with(name)))
        };
        assert_eq!(decided(Gpu::Auto, "2", &["nvidia1", "nvidia3"]), [gpus[1].clone(), gpus[3].clone()]);
        assert_eq!(decided(Gpu::Auto, "2", &["nvidia1"]), gpus, "another task has the other one");
        assert_eq!(decided(Gpu::Auto, "", &["nvidia1"]), gpus);
        assert_eq!(decided(Gpu::All, "1", &["nvidia1"]), gpus);
    }

    #[test]
    fn a_variable_chooses_among_a_steps_gpus() {
        let gpus: Vec<PathBuf> = [1, 3].iter().map(|number| format!("/dev/nvidia{number}").into()).collect();
        let step: [(OsString, OsString); 1] = [("SLURMD_NODENAME".into(), "n1".into())];
        let chosen = |value: &str| Chosen::new(Gpu::Auto, &step, Some(("V", value.to_owned())));
        for value in ["", "all"] {
            assert_eq!(chosen(value).choice, Choice::All, "{value:?}");
        }
        assert_eq!(chosen("void").choice, Choice::Nothing);
        assert_eq!(chosen("none").choice, Choice::DriverOnly);
        for value in ["GPU-8932f937-d72c", "MIG-1", "0:0", "0,GPU-1", "-1", "x"] {
            assert_eq!(chosen(value).choice, Choice::Unknown, "{value}");
        }
        assert_eq!(chosen("0, 1").of_those(gpus.clone()), Ok(gpus.clone()));
        assert_eq!(chosen("1").of_those(gpus.clone()), Ok(vec![gpus[1].clone()]));
        assert_eq!(chosen("none").of_those(gpus.clone()), Ok(Vec::new()));
        assert_eq!(chosen("MIG-1").of_those(gpus.clone()), Ok(gpus.clone()));
        let message = "V=1,2: the step's GPUs on this node are 2, counted from 0: there is no 2";
        assert_eq!(chosen("1,2").of_those(gpus.clone()).unwrap_err().message, message);
        // Who wants all, or is not in a job, has all.
        let void = || Some(("V", "void".to_owned()));
        assert_eq!(Chosen::new(Gpu::All, &step, void()).choice, Choice::All);
        assert_eq!(Chosen::new(Gpu::Auto, &[], void()).choice, Choice::All);
        assert_eq!(Chosen::new(Gpu::Auto, &step, None).choice, Choice::All);
    }

    #[test]
    fn a_slurm_without_gpus() {
        let manages = |text: &str| manages_gpus(&SlurmConf::new(text));
        assert!(manages("GresTypes=nic, gpu\n") && manages("include /etc/slurm/gres.d/x\n"));
        let step = [("SLURMD_NODENAME".into(), "n1".into())];
        assert!(wanted(Gpu::Auto, &step, || Some(SlurmConf::new("ClusterName=x\n"))).0);
        assert!(!wanted(Gpu::Auto, &step, || Some(SlurmConf::new("GresTypes=gpu\n"))).0);
        assert!(!manages("ClusterName=x\ngrestypes=nic\n") && !manages(""));
    }

    #[test]
    fn a_step_without_gpus_gets_none() {
        let decided = |setting, pairs: &[(&str, &str)]| {
            let environment: Vec<_> = pairs.iter().map(|(name, value)| (name.into(), value.into())).collect();
            wanted(setting, &environment, || None).0
        };
        let step = ("SLURMD_NODENAME", "n1");
        assert!(decided(Gpu::Auto, &[]));
        assert!(!decided(Gpu::Auto, &[step]));
        assert!(decided(Gpu::All, &[step]));
        assert!(!decided(Gpu::None, &[]));
        assert!(decided(Gpu::Auto, &[step, ("SLURM_STEP_GPUS", "0")]));
        assert!(decided(Gpu::Auto, &[step, ("ROCR_VISIBLE_DEVICES", "1")]));
        assert!(!decided(Gpu::Auto, &[step, ("SLURM_GPUS_ON_NODE", "0")]));
        assert!(decided(Gpu::Auto, &[step, ("SLURM_GPUS_ON_NODE", "2")]));
        for value in ["", "NoDevFiles", "-1"] {
            assert!(!decided(Gpu::Auto, &[step, ("CUDA_VISIBLE_DEVICES", value)]), "{value}");
        }
    }
}
