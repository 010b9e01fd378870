//! What tells PyTorch's programs their place among the tasks of a step: the variables that its launcher, torchrun, would set.
//! Slurm has started the tasks in its place. Runs as the user, for every task.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use mizzen_core::config::Compatible;
use serde::{Deserialize, Serialize};

/// What the maker of a PyTorch image leaves in its environment.
const VERSION_VARIABLE: &str = "PYTORCH_VERSION";

/// Ports above those that the kernel gives to outgoing connections.
const PORTS: std::ops::Range<u64> = 61_000..65_536;

/// Which of them a program gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pytorch {
    /// None.
    #[default]
    None,
    /// RANK and LOCAL_RANK, which no script can set for all tasks.
    Ranks,
    /// These, and of all that `init_process_group("env://")` reads what no script has set.
    Missing,
    /// All that it reads.
    All,
}

/// What holds: what the user says, or else what the image is. Sites with pyxis have enroot's hook for such images, which sets all.
pub fn decide(
    asked: Option<bool>,
    image_environment: &[(OsString, OsString)],
    compatible: Compatible,
) -> Pytorch {
    let of_pytorch = || image_environment.iter().any(|(name, _)| name == VERSION_VARIABLE);
    match (asked, compatible) {
        (Some(true), _) => Pytorch::All,
        (None, Compatible::Pyxis) if of_pytorch() => Pytorch::Missing,
        (None, Compatible::Mizzen) if of_pytorch() => Pytorch::Ranks,
        (Some(false) | None, _) => Pytorch::None,
    }
}

/// The variables of this task. A batch script is none: what it had would reach the steps that it starts.
pub fn variables(wanted: Pytorch, host: &[(OsString, OsString)]) -> Vec<(&'static str, OsString)> {
    let value = |name: &str| host.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let number = |name: &str| value(name)?.to_str()?.parse::<u64>().ok();
    let Some(step) = number("SLURM_STEP_ID").filter(|_| wanted != Pytorch::None) else { return Vec::new() };
    let mut found = vec![("RANK", value("SLURM_PROCID")), ("LOCAL_RANK", value("SLURM_LOCALID"))];
    if matches!(wanted, Pytorch::Missing | Pytorch::All) {
        let nodes = value("SLURM_STEP_NODELIST").or_else(|| value("SLURM_JOB_NODELIST"));
        let port = number("SLURM_JOB_ID").map(|job| {
            // Steps of one job that run at the same time have different ones.
            let ports = PORTS.end - PORTS.start;
            (PORTS.start + (job % ports + step % ports) % ports).to_string().into()
        });
        found.extend([
            ("WORLD_SIZE", value("SLURM_STEP_NUM_TASKS").or_else(|| value("SLURM_NTASKS"))),
            ("MASTER_ADDR", nodes.as_ref().and_then(|nodes| first_node(nodes.as_bytes()))),
            ("MASTER_PORT", port),
        ]);
    }
    let holds = |name: &str| wanted == Pytorch::Missing && !name.ends_with("RANK") && value(name).is_some();
    found
        .into_iter()
        .filter(|(name, _)| !holds(name))
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
}

/// The first name of one of Slurm's lists of nodes: `gpu01` of `gpu[01-04,07],cpu3`.
fn first_node(list: &[u8]) -> Option<OsString> {
    let mut name = Vec::new();
    let mut bytes = list.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b',' => break,
            b'[' => {
                let range: Vec<u8> = bytes.by_ref().take_while(|byte| *byte != b']').collect();
                name.extend(range.into_iter().take_while(|byte| !b"-,".contains(byte)));
            }
            _ => name.push(byte),
        }
    }
    (!name.is_empty()).then(|| OsString::from_vec(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        list.iter().map(|(name, value)| (name.into(), value.into())).collect()
    }

    #[test]
    fn an_option_or_the_image_asks_for_them() {
        let image = pairs(&[(VERSION_VARIABLE, "2.5.1")]);
        let (ours, pyxis) = (Compatible::Mizzen, Compatible::Pyxis);
        assert_eq!(
            (decide(None, &image, ours), decide(None, &image, pyxis)),
            (Pytorch::Ranks, Pytorch::Missing)
        );
        for compatible in [ours, pyxis] {
            assert_eq!(decide(None, &[], compatible), Pytorch::None);
            assert_eq!(decide(Some(true), &[], compatible), Pytorch::All);
            assert_eq!(decide(Some(false), &image, compatible), Pytorch::None);
        }
    }

    #[test]
    fn they_are_made_of_slurms() {
        let task = pairs(&[
            ("SLURM_JOB_ID", "4537"),
            ("SLURM_STEP_ID", "2"),
            ("SLURM_PROCID", "5"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_JOB_NODELIST", "node[1-4]"),
            ("SLURM_STEP_NODELIST", "node[3-4]"),
        ]);
        let text = |wanted, host: &[(OsString, OsString)]| {
            let found = variables(wanted, host).into_iter();
            found.map(|(name, value)| format!("{name}={}", value.display())).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(text(Pytorch::Ranks, &task), "RANK=5 LOCAL_RANK=1");
        let all = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=node3 MASTER_PORT=61003";
        assert_eq!(text(Pytorch::All, &task), all);
        assert_eq!(text(Pytorch::None, &task), "");
        assert_eq!(text(Pytorch::Missing, &task), all);
        let own = [task.clone(), pairs(&[("MASTER_ADDR", "mine"), ("RANK", "7")])].concat();
        assert_eq!(text(Pytorch::Missing, &own), "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_PORT=61003");
        assert_eq!(text(Pytorch::All, &own), all);
        let script = pairs(&[("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0")]);
        assert_eq!(text(Pytorch::All, &script), "");
    }

    #[test]
    fn lists_of_nodes_have_a_first_one() {
        for (list, first) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("gpu[01-04,07],cpu3", "gpu01"),
            ("n-[7,9]x", "n-7x"),
            ("rack[0-1]node[2-3]", "rack0node2"),
        ] {
            assert_eq!(first_node(list.as_bytes()), Some(first.into()));
        }
        assert_eq!(first_node(b""), None);
    }
}
