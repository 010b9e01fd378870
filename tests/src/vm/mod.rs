//! Virtual machines with Debian's kernels: one node with Slurm on it, on which commands are run and their results brought out.
//!
//! ```text
//! disks of a machine:  vda  Debian with Slurm         (squashfs)     the root is an overlay of vdb and vda,
//!                      vdb  the product, the checks   (squashfs)     whose changes are on vdc
//!                      vdc  what is written           (ext4)
//!                      vdd  the results               (tar)
//! ```

pub mod arm64;
pub mod checks;
pub mod kernel;
pub mod kernels;
pub mod qemu;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::kernel::Kernel;
use self::qemu::{Accelerator, Machine, Qemu};
use crate::spec::{GROUP, HOMES, PASSWD};
use crate::{Cluster, Output, Release, Spec, User, run_tool, target_dir};

/// Copies are on the disk, and images in `/network` are used while they are copied there.
const MIZZEN_TOML: &str =
    "stage_directory = \"/local\"\nnetwork_file_systems = [\"ramfs\"]\nstage_read_through = \"64k\"\n";

/// What a machine is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// 64-bit x86.
    X86_64,
    /// 64-bit ARM.
    Aarch64,
}

impl Architecture {
    /// Debian's name for it.
    pub fn debian(self) -> &'static str {
        match self {
            Architecture::X86_64 => "amd64",
            Architecture::Aarch64 => "arm64",
        }
    }
}

/// A machine that makes some checks.
pub struct Vm {
    /// Names its directory below `target/vm`.
    pub name: String,
    /// What it is a machine of.
    pub architecture: Architecture,
    /// What it boots.
    pub kernel: Kernel,
    /// The Slurm that it has.
    pub release: Release,
    /// Debian with Slurm: the tree, and the same as squashfs.
    pub rootfs: (PathBuf, PathBuf),
    /// The installed product.
    pub product: PathBuf,
    /// Further files of the machine: their path there, and where they are here.
    pub files: Vec<(String, PathBuf)>,
}

/// A command that is run on the machine.
pub struct Script {
    /// What it is for.
    pub name: &'static str,
    /// Who runs it.
    pub user: User,
    /// Bash runs it.
    pub script: String,
}

/// What a machine gave back.
pub struct Results {
    /// The kernel, as it calls itself.
    pub kernel: String,
    /// How it was run.
    pub accelerator: Accelerator,
    /// From the start of the machine to its end.
    pub took: Duration,
    /// In the order of the commands: what came out, and how long it took.
    pub outputs: Vec<(Output, Duration)>,
    /// slurmd's log.
    pub slurmd_log: String,
}

impl Vm {
    /// Boots it, makes the checks, and waits for its end.
    pub fn run(&self, qemu: &Qemu, accelerator: Option<Accelerator>, commands: &[Script]) -> Result<Results> {
        let begin = Instant::now();
        let directory = target_dir().join("vm").join(&self.name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory)?;
        let directory = directory.canonicalize()?;
        let (ramdisk, console) = (directory.join("ramdisk"), directory.join("console"));
        self.kernel.write_ramdisk(&ramdisk).context("cannot make the ramdisk")?;
        let product = self.write_product(&directory, commands).context("cannot make the product's disk")?;
        let (disk, results) = (directory.join("disk"), directory.join("results"));
        File::create(&disk)?.set_len(1 << 30)?;
        run_tool(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk))?;
        File::create(&results)?.set_len(16 << 20)?;
        let disks =
            [(self.rootfs.1.canonicalize()?, false), (product, false), (disk, true), (results.clone(), true)];
        let machine = Machine {
            architecture: self.architecture,
            kernel: &self.kernel,
            ramdisk: &ramdisk,
            disks: &disks,
            console: &console,
        };
        let accelerator = match accelerator {
            Some(accelerator) => accelerator,
            None => qemu.accelerator(&machine)?,
        };
        qemu.run(&machine, accelerator)?;
        let printed = String::from_utf8_lossy(&fs::read(&console)?).into_owned();
        let words = |begin: &str| printed.lines().find_map(|line| line.trim().strip_prefix(begin));
        if let Some(why) = words("@@ failed: ") {
            bail!("{}: {why}\n{printed}", self.name);
        }
        let kernel = words("@@ kernel ").with_context(|| format!("{}: no kernel\n{printed}", self.name))?;
        let unpacked = directory.join("unpacked");
        fs::create_dir(&unpacked)?;
        run_tool(Command::new("tar").arg("-xf").arg(&results).arg("-C").arg(&unpacked))?;
        let read = |name: &str| fs::read(unpacked.join(name)).with_context(|| format!("no result: {name}"));
        let mut outputs = Vec::new();
        for (index, command) in commands.iter().enumerate() {
            let of = |name: &str| {
                Ok::<_, anyhow::Error>(
                    String::from_utf8_lossy(&read(&format!("{}/{name}", command.directory(index)))?)
                        .into_owned(),
                )
            };
            let output =
                Output { code: of("code")?.trim().parse()?, stdout: of("stdout")?, stderr: of("stderr")? };
            outputs.push((output, Duration::from_millis(of("milliseconds")?.trim().parse()?)));
        }
        // What is large and of no use when all went well.
        for file in disks.iter().skip(1).map(|(file, _)| file).chain([&ramdisk]) {
            fs::remove_file(file)?;
        }
        let slurmd_log = String::from_utf8_lossy(&read("slurmd-node1.log")?).into_owned();
        Ok(Results { kernel: kernel.to_owned(), accelerator, took: begin.elapsed(), outputs, slurmd_log })
    }

    /// The product, the configuration of the node and the commands, as a layer over the root file system.
    fn write_product(&self, directory: &Path, commands: &[Script]) -> Result<PathBuf> {
        let root = directory.join("product.tree");
        run_tool(Command::new("cp").args(["-a", "--"]).arg(&self.product).arg(&root))?;
        let spec = Spec {
            release: self.release,
            nodes: 1,
            slurm_conf: vec!["SlurmctldHost=node1".to_owned()],
            ..Cluster::spec(&self.name)
        };
        let passwd = |name: &str| {
            let places = [format!("etc/{name}"), format!("usr/share/base-passwd/{name}.master")];
            let found = places.iter().find_map(|place| fs::read_to_string(self.rootfs.0.join(place)).ok());
            found.with_context(|| format!("no {name}"))
        };
        let munge = if passwd("passwd")?.contains("\nmunge:") {
            ""
        } else {
            "munge:x:64:64::/var/lib/munge:/usr/sbin/nologin\n"
        };
        let texts = [
            ("etc/passwd", passwd("passwd")? + munge + PASSWD),
            ("etc/group", passwd("group")? + if munge.is_empty() { "" } else { "munge:x:64:\n" } + GROUP),
            ("etc/hosts", "127.0.0.1 localhost\n10.77.0.1 node1\n".to_owned()),
            ("etc/hostname", "node1\n".to_owned()),
            ("etc/slurm/slurm.conf", spec.slurm_conf_text()),
            ("etc/slurm/cgroup.conf", spec.cgroup_conf_text()),
            ("etc/slurm/plugstack.conf", spec.plugstack.join("\n") + "\n"),
            ("etc/mizzen/mizzen.toml", MIZZEN_TOML.to_owned()),
            ("vm/run", include_str!("run.sh").to_owned()),
        ];
        for (name, text) in texts {
            write(&root.join(name), text.as_bytes())?;
        }
        for (place, file) in &self.files {
            let target = root.join(place);
            fs::create_dir_all(target.parent().context("a file at the top")?)?;
            run_tool(Command::new("cp").args(["-a", "--"]).arg(file).arg(&target))?;
        }
        for (user, uid) in HOMES {
            let home = root.join("home").join(user);
            fs::create_dir_all(&home)?;
            std::os::unix::fs::chown(&home, Some(uid), Some(uid))?;
        }
        for (index, command) in commands.iter().enumerate() {
            let place = root.join("vm/checks").join(command.directory(index));
            write(&place.join("user"), command.user.name().as_bytes())?;
            write(&place.join("script"), command.script.as_bytes())?;
        }
        let image = directory.join("product");
        let options = ["-comp", "zstd", "-Xcompression-level", "1", "-quiet", "-no-progress"];
        run_tool(Command::new("mksquashfs").arg(&root).arg(&image).args(options))?;
        fs::remove_dir_all(&root)?;
        Ok(image)
    }
}

impl Script {
    fn directory(&self, index: usize) -> String {
        format!("{index:02}-{}", self.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"))
    }
}

fn write(file: &Path, content: &[u8]) -> Result<()> {
    fs::create_dir_all(file.parent().context("a file at the top")?)?;
    fs::write(file, content).with_context(|| file.display().to_string())
}
