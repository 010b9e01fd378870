//! An import that is interrupted leaves nothing, and ends by the signal. A program of its own: signals go to processes, and
//! those of the test harness have threads that know nothing of this.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // clippy does not see that all of it is a test

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use mizzen_core::{Digest, Failure};
use mizzen_import::interrupt::{self, OnInterrupt};
use mizzen_import::output::{Existing, OutputFile};
use mizzen_import::store::key::ImageKey;
use mizzen_import::store::{ObtainOptions, Store};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::unix::process::ExitStatusExt;

fn main() {
    if let Some(directory) = std::env::var_os("MIZZEN_TEST_INTERRUPTED") {
        import(Path::new(&directory));
    }
    for (name, test) in [
        ("a_signal_removes_lease_and_temporary_names", interrupted as fn()),
        ("who_ignores_a_signal_goes_on", ignored),
    ] {
        test();
        println!("test {name} ... ok");
    }
}

/// What the child does: an import that never ends.
fn import(directory: &Path) -> ! {
    interrupt::listen().unwrap();
    let store = Store::open(&directory.join("images")).unwrap();
    let key = ImageKey {
        reference: "docker://host.io/a:b".to_owned(),
        digest: Digest::new([5; 32]),
        platform: "linux/amd64".to_owned(),
        writer: "v1".to_owned(),
        suffix: "sqsh",
    };
    let options = ObtainOptions { speaks: false, ..ObtainOptions::default() };
    let _ = store.obtain(&key, &options, |path| {
        let output = OutputFile::create(path, Existing::Replace)?;
        output.file().write_all(b"half").unwrap();
        // As on file systems where drafts have names.
        let named = path.with_file_name(".mizzen-tmp-named");
        std::fs::write(&named, "half").unwrap();
        let _on_interrupt = OnInterrupt::new(move || drop(std::fs::remove_file(&named)));
        std::fs::write(directory.join("begun"), "").unwrap();
        std::thread::sleep(Duration::from_secs(100));
        Err(Failure::new("nobody has interrupted it"))
    });
    std::process::exit(9);
}

struct Interrupted {
    child: Child,
    directory: PathBuf,
}

impl Interrupted {
    fn start(name: &str, program: &mut Command) -> Interrupted {
        let directory = std::env::temp_dir().join(format!("mizzen-interrupt-{}-{name}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let child = program.env("MIZZEN_TEST_INTERRUPTED", &directory).spawn().unwrap();
        let begin = Instant::now();
        while !directory.join("begun").exists() {
            assert!(begin.elapsed() < Duration::from_secs(60), "it does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        Interrupted { child, directory }
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.join("images")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn signal(&mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Interrupted {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// With the signals as a terminal has them: whoever runs the tests may ignore some (`nohup`).
fn own() -> Command {
    let mut program = Command::new("env");
    program.arg("--default-signal=INT,TERM,HUP").arg(std::env::current_exe().unwrap());
    program
}

fn interrupted() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let mut import = Interrupted::start(signal.as_str(), &mut own());
        assert_eq!(import.names().len(), 2, "{:?}", import.names());
        assert_eq!(import.signal(signal).signal(), Some(signal as i32), "{signal}");
        assert_eq!(import.names(), Vec::<String>::new(), "{signal}");
    }
}

fn ignored() {
    let mut program = Command::new("/bin/sh");
    let script = "trap '' HUP; exec \"$0\"";
    program.args(["-c", script]).arg(std::env::current_exe().unwrap());
    let mut import = Interrupted::start("ignored", &mut program);
    kill(Pid::from_raw(import.child.id() as i32), Signal::SIGHUP).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((import.child.try_wait().unwrap(), import.names().len()), (None, 2));
    assert_eq!(import.signal(Signal::SIGTERM).signal(), Some(Signal::SIGTERM as i32));
    assert_eq!(import.names(), Vec::<String>::new());
}
