//! What a cluster is made of, as plain data, and the Slurm configuration that follows from it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::release::Release;

/// The cluster's unprivileged users. Both are members of the group `research`; Alice alone is in `gpu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// The user who runs most tests.
    Alice,
    /// Another user, who must not be able to disturb Alice.
    Bob,
    /// The administrator.
    Root,
}

impl User {
    /// The login name.
    pub fn name(self) -> &'static str {
        match self {
            User::Alice => "alice",
            User::Bob => "bob",
            User::Root => "root",
        }
    }
}

/// Lines for /etc/passwd on every machine of the cluster.
pub const PASSWD: &str = "alice:x:2001:2001:Alice:/home/alice:/bin/bash\n\
                          bob:x:2002:2002:Bob:/home/bob:/bin/bash\n";
/// Lines for /etc/group.
pub const GROUP: &str = "alice:x:2001:\nbob:x:2002:\nresearch:x:2100:alice,bob\ngpu:x:2101:alice\n";
/// (name, uid) of the users with a home directory.
pub const HOMES: [(&str, u32); 2] = [("alice", 2001), ("bob", 2002)];

/// How `/shared`, the cluster's shared file system, is mounted on each machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SharedFs {
    /// A tmpfs; mizzen's configuration may declare it a network file system.
    Tmpfs,
    /// A FUSE file system (bindfs), which statfs reports as such.
    Fuse,
}

/// The description of one cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// Names the cluster's directory below `target/cluster`.
    pub name: String,
    /// Which Slurm runs.
    pub release: Release,
    /// Another root file system than the release's own.
    pub rootfs: Option<PathBuf>,
    /// Number of compute nodes, `node1` and so on.
    pub nodes: u32,
    /// Features of the first node, which the others have not.
    pub first_node_features: Option<String>,
    /// CPUs that each node offers, whatever this machine has.
    pub cpus: u32,
    /// Lines of plugstack.conf.
    pub plugstack: Vec<String>,
    /// Lines of slurm.conf; a key replaces the default of the same name.
    pub slurm_conf: Vec<String>,
    /// The nodes have no files of Slurm's in /etc/slurm, and get them from slurmctld.
    pub configless: bool,
    /// Every machine has an /etc/slurm of its own, with what Slurm's packages have put there, and `plugstack` does not count.
    pub own_etc_slurm: bool,
    /// Further files in /etc/slurm: name and content.
    pub slurm_files: Vec<(String, String)>,
    /// Content of /etc/mizzen/mizzen.toml; None leaves the installed file.
    pub mizzen_toml: Option<String>,
    /// How /shared is mounted.
    pub shared: SharedFs,
    /// Slurm uses cgroup v1 (proctrack and task plugins).
    pub cgroup_v1: bool,
    /// All machines run on one CPU. job_container/tmpfs needs it where the kernel numbers mount namespaces by CPU
    /// (seen with 6.18): Slurm binds the job's namespace file, which the kernel refuses (EINVAL) unless the job's
    /// number is higher than the node's, and on another CPU it may be lower.
    pub one_cpu: bool,
    /// Further device nodes of every machine, with the numbers of devices that open without such hardware. With them the
    /// machines have a /dev of their own: the kernel's devtmpfs is one for all.
    pub devices: Vec<(String, u64, u64)>,
    /// Directory trees laid over the root file system: the installed product.
    pub layers: Vec<PathBuf>,
}

/// Where `make install` puts the plugin when PREFIX is /usr, as in the cluster.
pub const PLUGIN: &str = "/usr/lib/mizzen/spank_mizzen.so";

impl Spec {
    /// The machines, the controller (also the login node) first.
    pub fn machines(&self) -> Vec<String> {
        std::iter::once("ctl".to_owned()).chain((1..=self.nodes).map(|i| format!("node{i}"))).collect()
    }

    /// The address of the machine with this index in [`Spec::machines`].
    pub fn address(index: usize) -> String {
        format!("10.77.{}.{}", index / 250, index % 250 + 1)
    }

    /// /etc/hosts, the same everywhere.
    pub fn hosts(&self) -> String {
        let mut hosts = "127.0.0.1 localhost\n".to_owned();
        for (index, name) in self.machines().iter().enumerate() {
            hosts.push_str(&format!("{} {name}\n", Spec::address(index)));
        }
        hosts
    }

    /// slurm.conf for this cluster.
    pub fn slurm_conf_text(&self) -> String {
        let defaults = [
            ("ClusterName", "mizzen"),
            ("SlurmctldHost", "ctl"),
            ("SlurmUser", "root"),
            ("AuthType", "auth/munge"),
            ("StateSaveLocation", "/var/spool/slurmctld"),
            ("SlurmdSpoolDir", "/var/spool/slurmd"),
            ("SlurmctldLogFile", "/var/log/slurm/slurmctld.log"),
            ("SlurmdLogFile", "/var/log/slurm/slurmd-%h.log"),
            ("SlurmdDebug", "verbose"),
            ("SlurmctldPidFile", "/run/slurmctld.pid"),
            ("SlurmdPidFile", "/run/slurmd.pid"),
            ("ProctrackType", if self.cgroup_v1 { "proctrack/cgroup" } else { "proctrack/linuxproc" }),
            ("TaskPlugin", if self.cgroup_v1 { "task/cgroup" } else { "task/none" }),
            ("SelectType", "select/cons_tres"),
            ("SelectTypeParameters", "CR_CPU"),
            ("MpiDefault", "none"),
            ("ReturnToService", "2"),
            ("SlurmdParameters", "config_overrides"),
            ("SlurmctldParameters", if self.configless { "enable_configless" } else { "" }),
            ("KillWait", "5"),
            // Heterogeneous jobs wait for the backfill scheduler, which by default looks every 30 seconds.
            ("SchedulerParameters", "bf_interval=1,sched_interval=1"),
        ];
        let key = |line: &str| line.split('=').next().unwrap_or_default().trim().to_ascii_lowercase();
        let own: Vec<String> = self.slurm_conf.iter().map(|line| key(line)).collect();
        let mut text = String::new();
        for (name, value) in defaults {
            if !value.is_empty() && !own.contains(&name.to_ascii_lowercase()) {
                text.push_str(&format!("{name}={value}\n"));
            }
        }
        for line in &self.slurm_conf {
            text.push_str(&format!("{line}\n"));
        }
        let mut first = 1;
        if let Some(features) = &self.first_node_features {
            text.push_str(&self.node_line("node1", &format!(" Feature={features}")));
            first = 2;
        }
        match self.nodes {
            last if last == first => text.push_str(&self.node_line(&format!("node{last}"), "")),
            last if last > first => text.push_str(&self.node_line(&format!("node[{first}-{last}]"), "")),
            _ => {}
        }
        text.push_str("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n");
        text
    }

    fn node_line(&self, names: &str, more: &str) -> String {
        format!("NodeName={names} CPUs={} RealMemory=4000 State=UNKNOWN{more}\n", self.cpus)
    }

    /// cgroup.conf for this cluster.
    pub fn cgroup_conf_text(&self) -> String {
        match (self.cgroup_v1, self.release) {
            (true, Release::Slurm20_11) => "CgroupMountpoint=/sys/fs/cgroup\n".to_owned(),
            (true, _) => "CgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=cgroup/v1\n".to_owned(),
            // What 22.05 does by itself is to look for a cgroup mount, and to fail without one.
            (false, Release::Slurm22_05) => "CgroupPlugin=cgroup/v1\n".to_owned(),
            // Without this key slurmd of these releases does not start where cgroup v2 has no controllers.
            (false, Release::Slurm24_11 | Release::Slurm26_05) => "CgroupPlugin=disabled\n".to_owned(),
            (false, Release::Slurm20_11) => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {

    #[test]
    fn a_line_of_the_test_replaces_the_default_of_the_same_key() {
        let mut spec = crate::Cluster::spec("t");
        spec.slurm_conf = vec!["proctracktype = proctrack/pgid".to_owned(), "TaskProlog=/x".to_owned()];
        let text = spec.slurm_conf_text();
        assert!(!text.contains("proctrack/linuxproc"), "{text}");
        assert!(text.contains("proctrack/pgid\n") && text.contains("TaskProlog=/x\n"), "{text}");
    }
}
