//! Which variables the program gets, and from whom.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::options::EnvOption;
use mizzen_core::settings::Key;

use super::mounts::ROOT_HOME;
use super::{Facts, pytorch};
use crate::options::RunOptions;
use crate::slurm;
use crate::variable_rules::{Rule, rule};

/// A variable of the program, and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// The name.
    pub name: OsString,
    /// The value.
    pub value: OsString,
    /// Where it comes from.
    pub why: Cow<'static, str>,
}

/// What PATH is in an image that does not say.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Tells programs which image they run in, if its digest is known.
pub const DIGEST_VARIABLE: &str = "MIZZEN_IMAGE_DIGEST";

/// Begin the names of variables that describe the job; an image knows nothing of it.
const JOBS: [&str; 6] = ["SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "MIZZEN_"];

/// Tells programs that they are in a container, and in which: the image's path, or its name in a registry.
pub const IMAGE_VARIABLE: &str = "MIZZEN_IMAGE";

/// The environment, in the order of names. `host` is the host's.
pub fn decide(options: &RunOptions, facts: &Facts, host: &[(OsString, OsString)]) -> Vec<Variable> {
    let mut chosen: BTreeMap<OsString, (OsString, Cow<'static, str>)> = BTreeMap::new();
    chosen.insert("PATH".into(), (DEFAULT_PATH.into(), "default".into()));
    if let Some(zone) = &facts.time_zone {
        chosen.insert("TZ".into(), (zone.into(), "the node's time zone".into()));
    }
    // Those of another step mean nothing here, nor does what belongs to another image.
    let between = [slurm::HOST_VARIABLE, slurm::caller_context::VARIABLE];
    let of_other_step = |name: &OsString| {
        [DIGEST_VARIABLE, IMAGE_VARIABLE].iter().any(|ours| name == *ours)
            || options.step.is_some() && between.iter().any(|between| name == *between)
    };
    for (name, value) in host.iter().filter(|(name, _)| !of_other_step(name)) {
        let kept = match rule(name) {
            Some(Rule::Drop) => false,
            Some(Rule::Host) => true,
            None => !options.clean_env,
        };
        if kept {
            chosen.insert(name.clone(), (value.clone(), "host".into()));
        }
    }
    // Slurm's commands, which run outside, would obey some of them.
    let is_jobs = |name: &OsString| JOBS.iter().any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()));
    for (name, value) in facts.image_environment.iter().filter(|(name, _)| !is_jobs(name)) {
        let hosts = rule(name) == Some(Rule::Host) && chosen.contains_key(name);
        if !hosts {
            chosen.insert(name.clone(), (value.clone(), "image".into()));
        }
    }
    for (name, value) in &facts.mpi_environment {
        chosen.insert(name.clone(), (value.clone(), "what the image's MPI library has".into()));
    }
    for (name, value) in &facts.host_libraries.set {
        chosen.insert(name.into(), (value.into(), "the node's libraries".into()));
    }
    // A program inside has started this step: what it exported holds, as it would outside.
    if let Some(inside) = options.inside() {
        for (name, value) in host.iter().filter(|(name, _)| rule(name).is_none()) {
            chosen.insert(name.clone(), (value.clone(), "the calling container".into()));
        }
        for (name, value) in &inside.variables {
            chosen.insert(name.clone(), (value.clone(), "the calling container".into()));
        }
    }
    if let Some(address) = &facts.commands {
        let commands = Path::new(slurm::DIRECTORY).join("bin");
        let path = chosen.get(OsStr::new("PATH")).map(|(path, _)| path.clone()).unwrap_or_default();
        if !std::env::split_paths(&path).any(|directory| directory == commands) {
            let mut longer = commands.into_os_string();
            longer.push(":");
            longer.push(&path);
            chosen.insert("PATH".into(), (longer, "Slurm's commands before the image's".into()));
        }
        chosen.insert(slurm::HOST_VARIABLE.into(), (address.into(), "Slurm's commands".into()));
    }
    chosen.insert(IMAGE_VARIABLE.into(), (facts.image.clone(), "the image".into()));
    if let Some(digest) = &facts.digest {
        let why = if facts.reference.is_some() { "the image's manifest" } else { "the image's content" };
        chosen.insert(DIGEST_VARIABLE.into(), (digest.into(), why.into()));
    }
    if facts.remapped {
        chosen.insert("HOME".into(), (ROOT_HOME.into(), "root's inside".into()));
    }
    for (name, value) in pytorch::variables(facts.pytorch, host) {
        chosen.insert(name.into(), (value, "the task's place, for PyTorch".into()));
    }
    chosen.insert("PWD".into(), (facts.workdir.clone().into(), "the working directory".into()));
    for (option, origin) in &facts.environment {
        let why: Cow<'static, str> = origin.name_of(Key::Env).into();
        match option {
            EnvOption::Set(name, value) => drop(chosen.insert(name.clone(), (value.clone(), why))),
            EnvOption::FromHost(name) => {
                // Unset there: the image's stays.
                if let Some((_, value)) = host.iter().find(|(known, _)| known == name) {
                    chosen.insert(name.clone(), (value.clone(), why));
                }
            }
            EnvOption::Unset(name) => drop(chosen.remove(name)),
        }
    }
    // Last: who sets LD_LIBRARY_PATH means the image's libraries, and not to be without the node's.
    for (name, directories) in
        [("LD_LIBRARY_PATH", &facts.host_libraries.libraries), ("PATH", &facts.host_libraries.programs)]
    {
        let old = chosen.get(OsStr::new(name)).map(|(value, _)| value.clone()).unwrap_or_default();
        let rest = std::env::split_paths(&old)
            .filter(|directory| !old.is_empty() && !directories.contains(directory));
        let all = directories.iter().cloned().chain(rest);
        if let Ok(longer) = std::env::join_paths(all)
            && !directories.is_empty()
        {
            chosen.insert(name.into(), (longer, "the node's libraries before the image's".into()));
        }
    }
    // It has seen all of the above.
    for (name, value) in &facts.entrypoint_changes {
        match value {
            Some(value) => {
                drop(chosen.insert(name.clone(), (value.clone(), "the image's entrypoint".into())))
            }
            None => drop(chosen.remove(name)),
        }
    }
    chosen.into_iter().map(|(name, (value, why))| Variable { name, value, why }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Origin;

    fn pairs(list: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        list.iter().map(|(name, value)| (name.into(), value.into())).collect()
    }

    fn decided(clean_env: bool, environment: Vec<EnvOption>) -> BTreeMap<String, String> {
        let environment_of_host = pairs(&[
            ("PATH", "/host/bin"),
            ("LD_PRELOAD", "/host/evil.so"),
            ("HOME", "/home/alice"),
            ("SLURM_JOB_ID", "7"),
            ("OMP_NUM_THREADS", "4"),
            ("CONDA_PREFIX", "/host/conda"),
            ("BASH_FUNC_module%%", "() { :; }"),
            ("LANG", "de_DE.UTF-8"),
            ("LC_ALL", "de_DE.UTF-8"),
        ]);
        let environment_of_image = pairs(&[
            ("PATH", "/image/bin"),
            ("HOME", "/root"),
            ("CONDA_PREFIX", "/opt/conda"),
            ("LD_LIBRARY_PATH", "/opt/lib"),
            ("LANG", "C.UTF-8"),
            ("SLURM_TASK_PROLOG", "/image/evil"),
        ]);
        let facts = Facts {
            image_environment: environment_of_image,
            environment: environment.into_iter().map(|option| (option, Origin::Option)).collect(),
            workdir: "/work".into(),
            image: "/tf.sqsh".into(),
            ..Facts::default()
        };
        let options = RunOptions { clean_env, ..RunOptions::default() };
        let text = |value: OsString| value.into_string().unwrap();
        let variables = decide(&options, &facts, &environment_of_host);
        variables.into_iter().map(|variable| (text(variable.name), text(variable.value))).collect()
    }

    #[test]
    fn each_side_wins_where_it_knows_better() {
        let variables = decided(false, Vec::new());
        let expected = [
            ("CONDA_PREFIX", "/opt/conda"),
            ("HOME", "/home/alice"),
            ("LANG", "C.UTF-8"),
            ("LD_LIBRARY_PATH", "/opt/lib"),
            ("MIZZEN_IMAGE", "/tf.sqsh"),
            ("OMP_NUM_THREADS", "4"),
            ("PATH", "/image/bin"),
            ("PWD", "/work"),
            ("SLURM_JOB_ID", "7"),
        ];
        assert_eq!(variables, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn options_win_over_both() {
        let options = vec![
            EnvOption::Set("PATH".into(), "/mine".into()),
            EnvOption::FromHost("CONDA_PREFIX".into()),
            EnvOption::FromHost("SLURM_NOT_SET".into()),
            EnvOption::FromHost("LD_PRELOAD".into()),
            EnvOption::FromHost("LC_ALL".into()),
            EnvOption::FromHost("LD_LIBRARY_PATH".into()),
            EnvOption::Unset("LANG".into()),
            EnvOption::Unset("NOT_SET".into()),
        ];
        let variables = decided(true, options);
        assert_eq!(variables["PATH"], "/mine");
        assert_eq!(variables["CONDA_PREFIX"], "/host/conda");
        assert_eq!(variables["LD_PRELOAD"], "/host/evil.so");
        assert_eq!(variables["LC_ALL"], "de_DE.UTF-8");
        // "unset on the host: the image's stays"
        assert_eq!(variables["LD_LIBRARY_PATH"], "/opt/lib");
        assert!(!variables.contains_key("OMP_NUM_THREADS"), "--clean-env");
        assert!(!variables.contains_key("LANG"), "unset, although the image has it");
        assert!(variables.contains_key("SLURM_JOB_ID") && variables.contains_key("HOME"));
    }
}
