//! Packages that root inside a container installs, in repositories that need no network.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::images::ImageTree;
use crate::{Cluster, run_tool};

/// A package of Debian's kind as many are: a program, files with owners, and a script that makes a user and a device.
fn debian_package() -> Result<Vec<u8>> {
    let tree = ImageTree::empty()?;
    let control = "Package: crew\nVersion: 1\nArchitecture: all\nMaintainer: Alice <alice@example.org>\nDescription: a crew\n";
    tree.file("package/DEBIAN/control", control)?;
    let script = "#!/bin/sh\nset -e\ngroupadd --system crew\nuseradd --system --gid crew crew\n\
                  chown crew:crew /usr/share/crew /usr/share/crew/log\nmknod /usr/share/crew/null c 1 3\n";
    tree.program("package/DEBIAN/postinst", script)?;
    tree.file("package/usr/share/crew/log", "aye\n")?;
    tree.program("package/usr/bin/crew", "#!/bin/sh\ncat /usr/share/crew/log\n")?;
    std::os::unix::fs::chown(tree.path("package/usr/share/crew/log"), Some(33), Some(33))?;
    let file = tree.path("crew.deb");
    run_tool(Command::new("dpkg-deb").arg("--build").arg(tree.path("package")).arg(&file))?;
    std::fs::read(file).context("crew.deb")
}

/// Makes /shared/repository, with that package for apt.
pub fn share_repository(cluster: &Cluster) -> Result<()> {
    cluster.share("crew.deb", &debian_package()?)?;
    let made = cluster.run_as_root(
        "mkdir /shared/repository && cd /shared/repository && mv ../crew.deb . && \
         { dpkg-deb -f crew.deb; echo Filename: ./crew.deb; echo Size: $(stat -c %s crew.deb); \
         echo SHA256: $(sha256sum crew.deb | cut -d' ' -f1); } > Packages && chmod -R a+rX .",
    );
    ensure!(made.code == 0, "{}", made.text());
    Ok(())
}
