//! Imports that are killed at a system call, as strace can do it: what is left is whole or not there, and the next import
//! works. A sample of the calls; all of them with MIZZEN_TEST_LONG.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use common::Scratch;
use common::layers::sample;
use common::layout::Layout;
use common::program::{Home, digest_of, outcome};
use common::registry::Registry;
use serde_json::Value;

/// The calls that change something which others see, or wait for it. Between them a kill leaves what it leaves at the next.
const CALLS: [&str; 20] = [
    "openat",
    "write",
    "pwrite64",
    "copy_file_range",
    "fsync",
    "fdatasync",
    "linkat",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "mkdir",
    "ftruncate",
    "utimensat",
    "fallocate",
    "sendto",
    "recvfrom",
    "lseek",
    "pread64",
    "close",
];
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Kills of a short run.
const SAMPLE: usize = 30;

/// Without /proc a file cannot be made without a name, as on file systems that cannot do it either.
const NAMED: &str = "mount -t tmpfs none /proc && exec \"$0\" \"$@\"";

struct Image {
    registry: Registry,
    reference: String,
    /// Of the file.
    digest: String,
    /// Digests of the converted layers, by name.
    layers: BTreeMap<String, String>,
    /// Who has imported it without trouble.
    clean: Home,
}

/// How an import is killed.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// Files have temporary names until they are complete.
    named: bool,
    /// The layers are there. strace counts the calls of each thread, and those that convert layers come first: without them
    /// the kill is in what writes the image.
    cached: bool,
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

impl Image {
    fn new() -> Image {
        let scratch = Scratch::new();
        let layout = Layout::new(&scratch.path().join("oci"));
        layout.name("x", layout.image(&sample(), "amd64"));
        let registry = Registry::start();
        registry.push(layout.path(), "x", "a/b:1", &["--dest-tls-verify=false"]);
        let reference = registry.reference("a/b:1");
        let home = Home::with_config(&registry.plain_config());
        let imported = home.import(&[&reference]);
        assert_eq!(imported.code, Some(0), "{}", imported.stderr);
        let digest = digest_of(imported.stdout.trim_end().as_ref());
        let layers: BTreeMap<_, _> = names(&home.layers())
            .into_iter()
            .map(|name| (name.clone(), digest_of(&home.layers().join(name))))
            .collect();
        assert_eq!(layers.len(), 2, "{layers:?}");
        assert_eq!(names(&home.store()).len(), 2, "an image and its sidecar: {:?}", names(&home.store()));
        Image { registry, reference, digest, layers, clean: home }
    }

    fn home(&self, way: Way) -> Home {
        let home = Home::with_config(&self.registry.plain_config());
        if way.cached {
            fs::create_dir_all(home.layers()).unwrap();
            for name in self.layers.keys() {
                fs::copy(self.clean.layers().join(name), home.layers().join(name)).unwrap();
            }
        }
        home
    }

    /// Nothing that has the name of an image or a layer is another, or a part of it.
    fn check(&self, home: &Home, what: &str) {
        for name in names(&home.store()) {
            let path = home.store().join(&name);
            if name.starts_with(".mizzen-") {
                continue;
            }
            if name.ends_with(".sqsh") {
                assert_eq!(digest_of(&path), self.digest, "{what}: {name}");
            } else {
                let image = name.strip_suffix(".json").unwrap_or_else(|| panic!("{what}: {name}"));
                let sidecar: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
                assert!(home.store().join(image).exists(), "{what}: a sidecar of nothing");
                // Whoever repairs it does not read all of the image.
                let digest = format!("sha256:{}", self.digest);
                assert!(sidecar["digest"].is_null() || sidecar["digest"] == digest, "{what}: {sidecar}");
            }
        }
        for name in names(&home.layers()).iter().filter(|name| !name.starts_with(".mizzen-tmp-")) {
            assert_eq!(Some(&digest_of(&home.layers().join(name))), self.layers.get(name), "{what}: {name}");
        }
    }

    /// Kills an import at a call, looks at what is left, and imports again. Whether the call was there at all.
    fn kill(&self, call: &str, number: usize, way: Way) -> bool {
        let what = format!("{call} {number}, {way:?}");
        let (home, named) = (self.home(way), way.named);
        let inject = format!("inject={call}:signal=KILL:when={number}");
        let status =
            strace(&home, &["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject], named)
                .args(["-j", "2", &self.reference])
                .output()
                .unwrap();
        let killed = status.status.signal() == Some(9);
        assert!(killed || status.status.success(), "{what}: {}", String::from_utf8_lossy(&status.stderr));
        self.check(&home, &what);
        if named {
            // Without /proc it did not say when it was started, and so only time would tell that it is dead.
            let leases = names(&home.store()).into_iter().filter(|name| name.starts_with(".mizzen-lease"));
            leases.for_each(|name| fs::remove_file(home.store().join(name)).unwrap());
        }
        let started = std::time::Instant::now();
        let again = outcome(&mut home.command(&["-j", "2", &self.reference]));
        assert_eq!(again.code, Some(0), "{what}: {}", again.stderr);
        // Who died is known to be dead, and not waited for.
        assert!(started.elapsed().as_secs() < 20, "{what}: {:?}", started.elapsed());
        assert_eq!(digest_of(again.stdout.trim_end().as_ref()), self.digest, "{what}");
        self.check(&home, &what);
        let left = || -> Vec<PathBuf> {
            let left = names(&home.store()).into_iter().filter(|name| name.starts_with(".mizzen"));
            left.map(|name| home.store().join(name)).collect()
        };
        if named {
            // What is small goes after a day.
            for path in left() {
                let file = File::options().write(true).open(&path).unwrap();
                assert!(file.metadata().unwrap().len() < 4096, "{what}: {path:?}");
                file.set_times(FileTimes::new().set_modified(SystemTime::now() - 2 * DAY)).unwrap();
            }
            assert_eq!(home.import(&["--force", &self.reference]).code, Some(0), "{what}");
        }
        assert!(left().is_empty(), "{what}: {:?}", left());
        assert!(named || names(&home.layers()).len() == 2, "{what}: {:?}", names(&home.layers()));
        killed
    }
}

/// strace with these words in front of an import, which still lacks its own.
fn strace(home: &Home, words: &[&str], named: bool) -> Command {
    let import = home.command(&[]);
    let mut command = match named {
        false => Command::new("strace"),
        true => {
            let mut command = Command::new("unshare");
            command.args(["-m", "sh", "-c", NAMED, "strace"]);
            command
        }
    };
    command.args(["-f", "-qq"]).args(words).arg(import.get_program()).args(import.get_args());
    command.env_clear().envs(import.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
}

/// How often each thread that does it most makes a call.
fn counts(image: &Image, way: Way) -> Vec<(&'static str, usize)> {
    let (home, scratch) = (image.home(way), Scratch::new());
    let log = scratch.path().join("log");
    let words = ["-o", log.to_str().unwrap(), "-e", "signal=none"];
    common::run(strace(&home, &words, way.named).args(["-j", "2", &image.reference]));
    let mut counts = BTreeMap::<(&str, &str), usize>::new();
    let text = fs::read_to_string(log).unwrap();
    for line in text.lines().filter(|line| !line.contains("resumed>")) {
        let (thread, rest) = line.split_once(' ').unwrap();
        let call = rest.trim_start().split('(').next().unwrap();
        *counts.entry((call, thread)).or_default() += 1;
    }
    let most =
        |call: &str| counts.iter().filter(|((name, _), _)| *name == call).map(|(_, count)| *count).max();
    let found: Vec<_> = CALLS.iter().filter_map(|call| Some((*call, most(call)?))).collect();
    for needed in ["openat", "write", "fsync"] {
        assert!(found.iter().any(|(call, _)| *call == needed), "{found:?}");
    }
    // What gives a file its name differs: this shows which way it went.
    assert_eq!(
        found.iter().any(|(call, _)| *call == "renameat" || *call == "renameat2"),
        way.named,
        "{found:?}"
    );
    found
}

fn kill_all(way: Way) {
    let image = Image::new();
    let calls = counts(&image, way);
    let all: Vec<(&str, usize)> =
        calls.iter().flat_map(|(call, count)| (1..=*count).map(|number| (*call, number))).collect();
    let long = std::env::var_os("MIZZEN_TEST_LONG").is_some();
    let step = if long { 1 } else { all.len().div_ceil(SAMPLE) };
    // The last of each call are the interesting ones: there files get their names.
    let last = calls.iter().filter(|(call, _)| ["fsync", "linkat", "renameat"].contains(call)).copied();
    let chosen: Vec<_> = all.iter().copied().step_by(step).chain(last).collect();
    let killed = chosen.iter().filter(|(call, number)| image.kill(call, *number, way)).count();
    println!("{killed} of {} imports were killed; there are {} calls", chosen.len(), all.len());
    assert!(killed * 2 > chosen.len(), "only {killed} of {}", chosen.len());
}

#[test]
fn killed_while_layers_are_converted() {
    kill_all(Way { named: false, cached: false });
}

#[test]
fn killed_while_the_image_is_written() {
    kill_all(Way { named: false, cached: true });
}

#[test]
fn killed_while_layers_have_temporary_names() {
    kill_all(Way { named: true, cached: false });
}

#[test]
fn killed_while_the_image_has_a_temporary_name() {
    kill_all(Way { named: true, cached: true });
}
