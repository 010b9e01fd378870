//! Packages that root inside a container installs: in repositories of the cluster's own network, and from the mirror that this
//! machine has its packages from.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sched::{CloneFlags, setns};

use crate::images::{ImageTree, pack};
use crate::release::{dnf_rootfs, fetch_packages, make_once};
use crate::{Cluster, User, run_tool};

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

/// Debian's package of the time zones, from the mirror that this machine's apt knows; fetched once.
fn time_zones() -> Result<Vec<u8>> {
    let directory = make_once("tzdata", "tzdata", |directory| {
        std::fs::create_dir(directory)?;
        run_tool(Command::new("apt-get").args(["download", "tzdata"]).current_dir(directory)).map(drop)
    })?;
    let package =
        std::fs::read_dir(directory)?.next().context("apt-get download tzdata has left no file")??;
    Ok(std::fs::read(package.path())?)
}

/// The program `file` and what it needs beside what an image with Python has, of the distribution of [`crate::images::mpi`].
fn file_packages() -> Result<Vec<(String, Vec<u8>)>> {
    let mut packages = Vec::new();
    for entry in std::fs::read_dir(fetch_packages("bookworm", "file", "file")?)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if ["file_", "libmagic1_", "libmagic-mgc_"].iter().any(|package| name.starts_with(package)) {
            packages.push((name, std::fs::read(entry.path())?));
        }
    }
    ensure!(packages.len() == 3, "the packages of file: {:?}", packages.iter().map(|(name, _)| name));
    Ok(packages)
}

/// Makes /shared/repository, with that package, the time zones and `file` for apt.
pub fn share_repository(cluster: &Cluster) -> Result<()> {
    cluster.share("crew.deb", &debian_package()?)?;
    cluster.share("tzdata.deb", &time_zones()?)?;
    for (name, content) in file_packages()? {
        cluster.share(&name, &content)?;
    }
    let made = cluster.run_as_root(
        "mkdir /shared/repository && cd /shared/repository && mv ../*.deb . && \
         for file in *.deb; do dpkg-deb -f $file; echo Filename: ./$file; echo Size: $(stat -c %s $file); \
         echo SHA256: $(sha256sum $file | cut -d' ' -f1); echo; done > Packages && chmod -R a+rX .",
    );
    ensure!(made.code == 0, "{}", made.text());
    Ok(())
}

/// What rpm makes a package of: a user, files of theirs, one with the right to be root, one with a capability, and scripts before
/// and behind them that make the user and a device.
const RPM_SPEC: &str = r#"
Name: crew
Version: 1
Release: 1
Summary: A crew
License: none
BuildArch: noarch
%description
A crew.
%package shell
Summary: Stands for the shell that Debian has
Provides: /bin/sh
%description shell
Nothing.
%install
mkdir -p %{buildroot}/usr/share/crew %{buildroot}/usr/bin
echo aye > %{buildroot}/usr/share/crew/log
for name in crew crew-setuid crew-setgid crew-ping; do
  printf '#!/bin/sh\ncat /usr/share/crew/log\n' > %{buildroot}/usr/bin/$name
done
%pre
groupadd --system crew && useradd --system --gid crew crew
%post
set -e
chown crew:crew /usr/share/crew/log
chgrp crew /usr/share/crew && chmod 2755 /usr/share/crew
mknod /usr/share/crew/null c 1 3
%files shell
%files
%attr(0755, root, root) /usr/bin/crew
%attr(4755, root, root) /usr/bin/crew-setuid
%attr(2755, root, mail) /usr/bin/crew-setgid
%attr(0755, root, root) %caps(cap_net_raw=ep) /usr/bin/crew-ping
%attr(0750, crew, crew) %dir /usr/share/crew
%attr(0640, crew, crew) /usr/share/crew/log
"#;

/// Makes the image /shared/dnf.sqsh, and /shared/rpms with that package for dnf. They are made in a container of that image.
pub fn share_rpm_repository(cluster: &Cluster) -> Result<()> {
    let options = ["-comp", "zstd", "-Xcompression-level", "3", "-e", "var/cache", "var/lib/apt"];
    cluster.share("dnf.sqsh", &pack(&dnf_rootfs()?, &options)?)?;
    cluster.share("crew.spec", RPM_SPEC.as_bytes())?;
    let made = cluster.run_on(
        "node1",
        User::Alice,
        "mkdir rpms && mizzen run -m /shared/crew.spec:/crew.spec:ro /shared/dnf.sqsh sh -c \
         'rpmbuild -bb --quiet --define \"_rpmdir $PWD/rpms\" --define \"_topdir /tmp/rpmbuild\" /crew.spec && createrepo_c --quiet rpms' && \
         cp -r rpms /shared/",
    );
    ensure!(made.code == 0, "{}", made.text());
    Ok(())
}

/// /shared, served on the cluster's login node by http; it ends when it is dropped.
pub struct HttpServer {
    process: Child,
    logs: ImageTree,
}

impl HttpServer {
    /// Listens at this port.
    pub fn start(cluster: &Cluster, port: u16) -> Result<HttpServer> {
        let logs = ImageTree::empty()?;
        let ctl = cluster.pid_of("ctl");
        let shared = format!("/proc/{ctl}/root/shared");
        ensure!(Path::new(&shared).is_dir(), "{shared} is missing");
        // A program of this machine in the cluster's network, as it is with the registry.
        let process = Command::new("nsenter")
            .args(["--target", &ctl.to_string(), "--net", "/bin/busybox", "httpd", "-f", "-vv"])
            .args(["-p", &port.to_string(), "-h", &shared])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(logs.path("log"))?)
            .spawn()?;
        Ok(HttpServer { process, logs })
    }

    /// Whether something with this name was asked for.
    pub fn was_asked_for(&self, name: &str) -> bool {
        std::fs::read_to_string(self.logs.path("log")).unwrap_or_default().contains(name)
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The mirror that the nodes were installed from, in the network of a cluster, which has no way out: its name is the login node's
/// there, and whoever connects to that is connected from here. It ends when it is dropped.
pub struct Mirror {
    ended: Arc<AtomicBool>,
}

impl Mirror {
    /// Listens where `/etc/apt/sources.list` of the nodes says that it is.
    pub fn start(cluster: &Cluster) -> Result<Mirror> {
        let ctl = cluster.pid_of("ctl");
        let sources = std::fs::read_to_string(format!("/proc/{ctl}/root/etc/apt/sources.list"))?;
        let address = sources.split_whitespace().find_map(address_of);
        let (host, port) = address.with_context(|| format!("no mirror in {sources:?}"))?;
        // Of another network is what was opened there: the thread is left, the socket stays.
        let network = std::fs::File::open(format!("/proc/{ctl}/ns/net"))?;
        let listener = thread::spawn(move || -> Result<TcpListener> {
            setns(&network, CloneFlags::CLONE_NEWNET)?;
            Ok(TcpListener::bind(("0.0.0.0", port))?)
        });
        let listener = listener.join().map_err(|_| anyhow!("no socket on port {port}"))??;
        let name = cluster.run_as_root(&format!("echo $(getent hosts ctl | cut -d' ' -f1) {host}"));
        let hosts = std::fs::read_to_string(format!("/proc/{ctl}/root/etc/hosts"))?;
        cluster.write_everywhere("/etc/hosts", &(hosts + &name.stdout))?;
        let ended = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&ended);
        thread::spawn(move || relay(&listener, &host, port, &over));
        Ok(Mirror { ended })
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// The host and the port in the address of a server, if it is one.
fn address_of(word: &str) -> Option<(String, u16)> {
    let (scheme, rest) = word.split_once("://")?;
    let host = rest.split('/').next()?.rsplit('@').next()?;
    let port = if scheme == "https" { 443 } else { 80 };
    match host.split_once(':') {
        Some((host, port)) => Some((host.to_owned(), port.parse().ok()?)),
        None => Some((host.to_owned(), port)),
    }
}

fn relay(listener: &TcpListener, host: &str, port: u16, ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        let mut waiting = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        if !poll(&mut waiting, 100u16).is_ok_and(|ready| ready > 0) {
            continue;
        }
        if let (Ok((near, _)), Ok(far)) = (listener.accept(), TcpStream::connect((host, port))) {
            let (near, far) = (Arc::new(near), Arc::new(far));
            for (from, to) in [(Arc::clone(&near), Arc::clone(&far)), (far, near)] {
                thread::spawn(move || {
                    let _ = io::copy(&mut &*from, &mut &*to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    }
}
