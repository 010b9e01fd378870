//! Annotations of environment files: the names of CSCS's hooks. Those for which mizzen has something act, the others are named in
//! a note, once for each hook.

use std::collections::{BTreeMap, BTreeSet};

use mizzen_core::failure::quote;
use mizzen_core::settings::Fabric;
use mizzen_core::{Failure, Settings};

use super::document::Placed;

/// A hook, whether it asks for the node's fabric, and what to say to those who switch it on.
struct Hook {
    name: &'static str,
    fabric: bool,
    note: Option<&'static str>,
}

const HOOKS: [Hook; 4] = [
    Hook { name: "com.hooks.cxi", fabric: true, note: None },
    Hook {
        name: "com.hooks.aws_ofi_nccl",
        fabric: true,
        note: Some(
            "the node's libfabric is used; NCCL's plugin for it is the image's, or one that a rule in /etc/mizzen/host.d gives",
        ),
    },
    Hook {
        name: "com.hooks.ssh",
        fabric: false,
        note: Some(
            "has no effect: mizzen starts no server; --container-join enters the container of a running step",
        ),
    },
    Hook {
        name: "com.hooks.nvidia_cuda_mps",
        fabric: false,
        note: Some("has no effect: start nvidia-cuda-mps-control in the job, or ask for Slurm's gres/mps"),
    },
];

/// Carries out what annotations ask for; what has no effect is in the notes.
pub fn apply(
    annotations: &BTreeMap<String, Placed<String>>,
    settings: &mut Settings,
    notes: &mut Vec<String>,
) -> Result<(), Failure> {
    let mut told = BTreeSet::new();
    for (name, value) in annotations {
        let below = |hook: &&Hook| name.strip_prefix(hook.name).is_some_and(|rest| rest.starts_with('.'));
        let Some(hook) = HOOKS.iter().find(below) else {
            let shown = quote(name.as_bytes());
            notes
                .push(format!("{}: the annotation {shown} is not known here and has no effect", value.place));
            continue;
        };
        // What else a hook is told means nothing without it.
        if name.strip_prefix(hook.name) != Some(".enabled") {
            continue;
        }
        let on = match value.value.as_str() {
            "true" => true,
            "false" => false,
            other => {
                let failure =
                    Failure::new(format!("\"{}\" is neither true nor false", quote(other.as_bytes())));
                return Err(
                    value.about(format!("annotations.{name}"), failure.hint("write \"true\" or \"false\""))
                );
            }
        };
        // One that wants the fabric is enough, in whatever order they come.
        match (hook.fabric, on) {
            (true, true) => settings.fabric = Some(Fabric::Host),
            (true, false) => settings.fabric = settings.fabric.or(Some(Fabric::Image)),
            (false, _) => {}
        }
        if let Some(note) = hook.note.filter(|_| on && told.insert(hook.name)) {
            notes.push(format!("{}: {}: {note}", value.place, hook.name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::document::Place;

    fn apply_all(pairs: &[(&str, &str)]) -> (Option<Fabric>, Vec<String>) {
        let place = Place { file: "a".to_owned(), line: 1 };
        let placed = |value: &str| Placed { value: value.to_owned(), place: place.clone() };
        let annotations = pairs.iter().map(|(name, value)| ((*name).to_owned(), placed(value))).collect();
        let (mut settings, mut notes) = (Settings::default(), Vec::new());
        match apply(&annotations, &mut settings, &mut notes) {
            Ok(()) => (settings.fabric, notes),
            Err(failure) => (None, vec![failure.message]),
        }
    }

    #[test]
    fn known_ones_act_and_others_are_a_note() {
        let (cxi, aws) = ("com.hooks.cxi.enabled", "com.hooks.aws_ofi_nccl.enabled");
        assert_eq!(apply_all(&[]), (None, Vec::new()));
        assert_eq!(apply_all(&[(cxi, "true")]), (Some(Fabric::Host), Vec::new()));
        assert_eq!(apply_all(&[(cxi, "false")]), (Some(Fabric::Image), Vec::new()));
        let (fabric, notes) =
            apply_all(&[(cxi, "false"), (aws, "true"), ("com.hooks.aws_ofi_nccl.variant", "cuda12")]);
        assert_eq!((fabric, notes.len()), (Some(Fabric::Host), 1));
        assert!(
            notes[0].starts_with("a:1: com.hooks.aws_ofi_nccl: the node's libfabric is used;"),
            "{notes:?}"
        );
        let (fabric, notes) = apply_all(&[
            ("com.hooks.ssh.enabled", "true"),
            ("com.hooks.ssh.authorize_ssh_key", "/k"),
            ("com.hooks.nvidia_cuda_mps.enabled", "true"),
            ("com.hooks.nvidia_cuda_mps_x.enabled", "true"),
        ]);
        assert_eq!((fabric, notes.len()), (None, 3), "{notes:?}");
        assert!(notes.iter().any(|note| note.starts_with("a:1: com.hooks.ssh: has no effect:")), "{notes:?}");
        let unknown =
            "a:1: the annotation com.hooks.nvidia_cuda_mps_x.enabled is not known here and has no effect";
        assert!(notes.iter().any(|note| note == unknown), "{notes:?}");
        assert_eq!(apply_all(&[("com.hooks.ssh.enabled", "false")]), (None, Vec::new()));
        assert_eq!(
            apply_all(&[(cxi, "yes")]).1,
            ["a:1: annotations.com.hooks.cxi.enabled: \"yes\" is neither true nor false"]
        );
    }
}
