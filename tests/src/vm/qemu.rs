//! QEMU, which is taken from its packages and not installed: another release of the distribution's own may be in use here.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Architecture, kernel::Kernel};
use crate::release::extract_foreign;

/// Debian's release whose QEMU is used.
const DEBIAN: &str = "trixie";
const PACKAGES: &str = "qemu-system-x86,qemu-system-arm,qemu-user";
/// A machine with hardware support has said its first word by then, and one that the hardware cannot run never says it.
const FIRST_WORD: Duration = Duration::from_secs(15);
/// A machine that is emulated, on a busy computer.
const LIMIT: Duration = Duration::from_secs(1500);

/// How a machine is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// By the processor.
    Kvm,
    /// By translation of its instructions.
    Tcg,
}

/// The programs of QEMU.
pub struct Qemu {
    tree: PathBuf,
}

/// The parts of a machine.
pub struct Machine<'a> {
    /// What it is a machine of.
    pub architecture: Architecture,
    /// What it boots.
    pub kernel: &'a Kernel,
    /// What the kernel unpacks first.
    pub ramdisk: &'a Path,
    /// Files that are its disks, and whether they can be written.
    pub disks: &'a [(PathBuf, bool)],
    /// What it prints goes there.
    pub console: &'a Path,
}

impl Qemu {
    /// Unpacks it, unless that was done before.
    pub fn obtain() -> Result<Qemu> {
        Ok(Qemu { tree: extract_foreign(DEBIAN, "qemu", PACKAGES, Architecture::X86_64.debian())? })
    }

    /// A command of one of its programs, with the libraries from the same release.
    pub fn command(&self, program: &str) -> Command {
        let libraries = self.tree.join("usr/lib/x86_64-linux-gnu");
        let mut command = Command::new(self.tree.join("usr/lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries).arg(self.tree.join("usr/bin").join(program));
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command
    }

    /// The program that runs others of another processor on this kernel.
    pub fn user_program(&self, architecture: Architecture) -> Command {
        Command::new(self.tree.join(match architecture {
            Architecture::X86_64 => "usr/bin/qemu-x86_64",
            Architecture::Aarch64 => "usr/bin/qemu-aarch64",
        }))
    }

    /// Runs a machine until it switches itself off.
    pub fn run(&self, machine: &Machine, accelerator: Accelerator) -> Result<()> {
        let mut running = self.start(machine, accelerator)?;
        let begin = Instant::now();
        loop {
            if let Some(status) = running.0.try_wait()? {
                if status.success() {
                    return Ok(());
                }
                bail!("QEMU failed ({status}); it printed {}", last_lines(machine.console));
            }
            if begin.elapsed() > LIMIT {
                bail!("the machine does not end after {LIMIT:?}; it printed {}", last_lines(machine.console));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Which accelerator works for this machine here. /dev/kvm may be there and run no such kernel.
    pub fn accelerator(&self, machine: &Machine) -> Result<Accelerator> {
        if machine.architecture != Architecture::X86_64 || !Path::new("/dev/kvm").exists() {
            return Ok(Accelerator::Tcg);
        }
        let mut running = self.start(machine, Accelerator::Kvm)?;
        let begin = Instant::now();
        while begin.elapsed() < FIRST_WORD && running.0.try_wait()?.is_none() {
            if fs::read(machine.console)?.windows(2).any(|window| window == b"@@") {
                return Ok(Accelerator::Kvm);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(Accelerator::Tcg)
    }

    fn start(&self, machine: &Machine, accelerator: Accelerator) -> Result<Running> {
        let (program, kind, console) = match machine.architecture {
            Architecture::X86_64 => ("qemu-system-x86_64", "q35", "ttyS0"),
            Architecture::Aarch64 => ("qemu-system-aarch64", "virt", "ttyAMA0"),
        };
        let (accel, cpu) = match (accelerator, machine.architecture) {
            (Accelerator::Kvm, _) => ("kvm", "host"),
            (Accelerator::Tcg, Architecture::X86_64) => ("tcg,thread=multi", "max"),
            // The newest processor of QEMU's has pointer authentication, which is slow to emulate.
            (Accelerator::Tcg, Architecture::Aarch64) => ("tcg,thread=multi", "cortex-a72"),
        };
        let mut command = self.command(program);
        command
            .args(["-M", kind, "-accel", accel, "-cpu", cpu, "-smp", "2", "-m", "2048"])
            .args(["-display", "none", "-no-reboot", "-nic", "none", "-monitor", "none"])
            .arg("-L")
            .arg(self.tree.join("usr/share/qemu"))
            .arg("-L")
            .arg(self.tree.join("usr/share/seabios"))
            .arg("-serial")
            .arg(format!("file:{}", machine.console.display()))
            .arg("-kernel")
            .arg(machine.kernel.image())
            .arg("-initrd")
            .arg(machine.ramdisk)
            .args(["-append", &format!("console={console} quiet panic=-1 mitigations=off")]);
        for (file, writable) in machine.disks {
            let mode = if *writable { "off" } else { "on" };
            let file = file.display().to_string().replace(',', ",,");
            command
                .args(["-drive", &format!("file={file},if=virtio,format=raw,readonly={mode},cache=unsafe")]);
        }
        let said = machine.console.with_extension("qemu");
        File::create(machine.console)?;
        command.stdin(Stdio::null()).stdout(File::create(&said)?).stderr(File::create(&said)?);
        Ok(Running(command.spawn().context("cannot start QEMU")?))
    }
}

/// A machine that ends when nobody waits for it any more.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn last_lines(console: &Path) -> String {
    let text = |file: &Path| String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned();
    let text = text(console) + &text(&console.with_extension("qemu"));
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
