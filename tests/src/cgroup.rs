//! cgroup v1 directories of clusters: the only thing of a cluster that outlives its processes.
//!
//! Each machine gets a directory of its own in every v1 hierarchy and sees it as the root (a cgroup
//! namespace), so that Slurm on two nodes, or in two clusters, does not meet. The directory's name holds the
//! supervisor's pid: the supervisor removes it at the end, and the next cluster removes what a killed
//! supervisor left.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const ROOT: &str = "/sys/fs/cgroup";
/// The hierarchies that Slurm's cgroup plugins use.
const HIERARCHIES: [&str; 5] = ["freezer", "cpuset", "memory", "devices", "cpuacct"];
const PREFIX: &str = "mizzen-cluster-";

fn group(hierarchy: &str, supervisor: u32) -> PathBuf {
    Path::new(ROOT).join(hierarchy).join(format!("{PREFIX}{supervisor}"))
}

/// Moves the calling process into its own directory of every hierarchy and makes that its root.
pub fn enter(supervisor: u32, machine: &str) -> Result<()> {
    for hierarchy in HIERARCHIES {
        let dir = group(hierarchy, supervisor).join(machine);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make cgroup v1 {}", dir.display()))?;
        if hierarchy == "cpuset" {
            // A new cpuset is empty, and a process cannot join it before it has CPUs and memory.
            for dir in [group(hierarchy, supervisor), dir.clone()] {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let parent = dir.parent().unwrap_or(Path::new(ROOT));
                    fs::write(dir.join(file), fs::read(parent.join(file))?)?;
                }
            }
        }
        fs::write(dir.join("cgroup.procs"), "0")
            .with_context(|| format!("cannot enter {}", dir.display()))?;
    }
    unshare(CloneFlags::CLONE_NEWCGROUP).context("unshare(cgroup)")
}

/// Mounts the hierarchies below `root`, a machine's root directory, as the calling process sees them.
pub fn mount_in(root: &Path) -> Result<()> {
    let base = root.join("sys/fs/cgroup");
    mount(Some("tmpfs"), &base, Some("tmpfs"), MsFlags::empty(), Some("mode=755")).context("cgroup tmpfs")?;
    for hierarchy in HIERARCHIES {
        let dir = base.join(hierarchy);
        fs::create_dir(&dir)?;
        mount(Some("cgroup"), &dir, Some("cgroup"), MsFlags::empty(), Some(hierarchy))
            .with_context(|| format!("cannot mount cgroup v1 {hierarchy}"))?;
    }
    Ok(())
}

/// Removes the directories of one supervisor, whose processes are gone.
pub fn remove(supervisor: u32) {
    for hierarchy in HIERARCHIES {
        remove_tree(&group(hierarchy, supervisor));
    }
}

/// Removes the directories of supervisors that no longer live.
pub fn remove_stale() {
    for hierarchy in HIERARCHIES {
        let Ok(entries) = fs::read_dir(Path::new(ROOT).join(hierarchy)) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|n| n.strip_prefix(PREFIX)) else { continue };
            if !Path::new("/proc").join(pid).exists() {
                remove_tree(&entry.path());
            }
        }
    }
}

/// cgroup directories are removed leaf first; their files are not.
fn remove_tree(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}
