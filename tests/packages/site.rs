//! A cluster whose machines are as the distribution leaves them, and the tool that installs packages there.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use mizzen_tests::check::with_images;
use mizzen_tests::{Cluster, Output, Release, Spec, User, target_dir};

/// What installs packages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    Apt,
    /// On a Debian, whose packages rpm does not know: so it cannot be asked about dependencies.
    Rpm,
}

/// Which of the two versions that `make packages-test` builds.
#[derive(Clone, Copy)]
pub enum Version {
    This,
    Next,
}

/// A cluster of two nodes without mizzen.
pub struct Site {
    pub cluster: Cluster,
    pub tool: Tool,
}

impl Site {
    pub fn start(tool: Tool, spec: Spec) -> Site {
        let site =
            Site { cluster: with_images(Spec { plugstack: Vec::new(), layers: Vec::new(), ..spec }), tool };
        for version in [Version::This, Version::Next] {
            let package = fs::read(site.package(version)).unwrap();
            site.cluster.share(&site.file_name(version), &package).unwrap();
        }
        site
    }

    /// The machines of a cluster with these root file systems, each with an /etc/slurm of its own.
    pub fn spec(name: &str, release: Release, rootfs: Option<PathBuf>) -> Spec {
        Spec { release, rootfs, own_etc_slurm: true, ..Cluster::spec(name) }
    }

    fn package(&self, version: Version) -> PathBuf {
        let directory = target_dir().join(match version {
            Version::This => "dist",
            Version::Next => "packages/next",
        });
        let kind = match self.tool {
            Tool::Apt => "deb",
            Tool::Rpm => "rpm",
        };
        let files = fs::read_dir(&directory).into_iter().flatten().map(|entry| entry.unwrap().path());
        let mut packages = files.filter(|file| file.extension().is_some_and(|extension| extension == kind));
        match (packages.next(), packages.next()) {
            (Some(package), None) => package,
            _ => panic!("{} must have one package of this kind: make packages-test", directory.display()),
        }
    }

    /// The name of the package in /shared.
    pub fn file_name(&self, version: Version) -> String {
        self.package(version).file_name().unwrap().to_str().unwrap().to_owned()
    }

    /// What `mizzen --version` says of the package.
    pub fn build(&self, version: Version) -> String {
        let directory = match version {
            Version::This => "portable",
            Version::Next => "packages/next/portable",
        };
        let mizzen = target_dir().join(directory).join("mizzen");
        mizzen_tests::run_tool(std::process::Command::new(mizzen).arg("--version")).unwrap()
    }

    /// Runs a command as root on a machine, and wants it to succeed.
    #[track_caller]
    pub fn root(&self, machine: &str, script: &str) -> Output {
        let output = self.cluster.run_on(machine, User::Root, script);
        assert_eq!(output.code, 0, "{machine}: {script}: {}", output.text());
        output
    }

    /// Installs or upgrades, as nobody who answers questions; the settings that are there are kept.
    #[track_caller]
    pub fn install(&self, machine: &str, version: Version) -> Output {
        let file = self.file_name(version);
        self.root(machine, &match self.tool {
            Tool::Apt => format!(
                "DEBIAN_FRONTEND=noninteractive apt-get install -q -y -o Dpkg::Options::=--force-confold /shared/{file}"
            ),
            Tool::Rpm => format!("rpm --upgrade --nodeps /shared/{file}"),
        })
    }

    /// The command that removes it and keeps settings.
    pub fn remove_command(&self) -> &'static str {
        match self.tool {
            Tool::Apt => "DEBIAN_FRONTEND=noninteractive apt-get remove -q -y mizzen",
            Tool::Rpm => "rpm --erase mizzen",
        }
    }

    #[track_caller]
    pub fn remove(&self, machine: &str) -> Output {
        self.root(machine, self.remove_command())
    }
}

/// Whether it becomes true within half a minute.
pub fn eventually(true_now: impl Fn() -> bool) -> bool {
    (0..150).any(|_| {
        std::thread::sleep(Duration::from_millis(200));
        true_now()
    })
}
