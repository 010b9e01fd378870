//! mizzen in two lines of plugstack.conf: Slurm then calls every hook for both, two options of one name fight, and a task
//! would be handed to a launcher that hands it to another. Jobs without a container must not notice; others are refused with
//! the reason. Runs in every program that loads the plugin.

use std::path::{Path, PathBuf};

use mizzen_core::Failure;

use crate::version::loaded_libraries;

/// What this copy of the plugin has to do where there may be another.
#[derive(Debug)]
pub enum LoadRole {
    /// It is the only one.
    Only,
    /// It registers the options, and refuses containers for this reason.
    Refuses(Failure),
    /// Nothing: another copy refuses.
    Idle,
}

/// Called at each call of the first hook, which Slurm calls once for each line; `calls` counts them, this one too. Lines with
/// the same file share one copy in memory, other files have copies of their own. All are loaded before any is called.
pub fn load_role(own: &Path, calls: u32) -> LoadRole {
    if calls > 1 {
        return LoadRole::Refuses(loaded_twice(own, own));
    }
    let copies: Vec<PathBuf> =
        loaded_libraries().into_iter().filter(|path| path.file_name() == own.file_name()).collect();
    match copies.iter().find(|path| *path != own) {
        None => LoadRole::Only,
        Some(other) if copies.first().is_some_and(|first| first == own) => {
            LoadRole::Refuses(loaded_twice(own, other))
        }
        Some(_) => LoadRole::Idle,
    }
}

fn loaded_twice(own: &Path, other: &Path) -> Failure {
    let files = if own == other {
        own.display().to_string()
    } else {
        format!("{} and {}", own.display(), other.display())
    };
    Failure::new(format!("spank_mizzen.so is loaded twice: {files}"))
        .hint("remove one of the lines in plugstack.conf and the files that it includes")
}
