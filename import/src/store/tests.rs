//! One import for many processes, whatever happens to the one that does it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mizzen_core::{Digest, Failure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use super::key::ImageKey;
use super::lease::Timing;
use super::sidecar::{self, Provenance, Sidecar};
use super::testing::Scratch;
use super::{ObtainOptions, Store, StoredImage};
use crate::output::{Existing, OutputFile};

/// Tells a process of these tests that it is to obtain an image, and how: what to do, and where.
const CHILD: &str = "MIZZEN_TEST_STORE_CHILD";
/// What every import writes.
const CONTENT: &[u8] = &[7; 4096];

fn key(tag: &str) -> ImageKey {
    ImageKey {
        reference: format!("docker://host.io/a:{tag}"),
        digest: Digest::new([5; 32]),
        platform: "linux/amd64".to_owned(),
        writer: "v1".to_owned(),
        suffix: "sqsh",
    }
}

/// Fast enough for tests, and slow enough for a loaded machine.
fn options() -> ObtainOptions {
    ObtainOptions {
        speaks: false,
        patience: Duration::from_secs(60),
        timing: Timing {
            renew: Duration::from_millis(100),
            poll: Duration::from_millis(20),
            silent: Duration::from_millis(2000),
            old: Duration::from_secs(600),
        },
        ..ObtainOptions::default()
    }
}

/// A store in a directory of its own, and a log beside it of who has imported.
struct Fixture {
    scratch: Scratch,
    store: Store,
}

impl Fixture {
    fn new() -> Fixture {
        let scratch = Scratch::new();
        let store = Store::open(&scratch.path().join("images")).unwrap();
        Fixture { scratch, store }
    }

    fn child(&self, action: &str) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "store::tests::child_process", "--ignored", "--nocapture"]);
        command.env(CHILD, format!("{action}:{}", self.scratch.path().display()));
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap()
    }

    /// How many imports have begun.
    fn imports(&self) -> usize {
        fs::read_to_string(self.scratch.path().join("log")).map_or(0, |log| log.lines().count())
    }

    fn wait_for_imports(&self, count: usize) {
        wait_until(|| self.imports() >= count);
    }

    fn obtain(&self, options: &ObtainOptions) -> Result<StoredImage, Failure> {
        obtain(&self.store, self.scratch.path(), options, write)
    }

    fn lease(&self) -> std::path::PathBuf {
        self.store.directory().join(key("1").lease_name())
    }

    /// What is in the store beside images and what is known of them.
    fn leftovers(&self) -> Vec<String> {
        let entries = fs::read_dir(self.store.directory()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with('.')).collect()
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn obtain(
    store: &Store,
    log: &Path,
    options: &ObtainOptions,
    work: impl FnOnce(&Path) -> Result<Provenance, Failure>,
) -> Result<StoredImage, Failure> {
    store.obtain(&key("1"), options, |path| {
        let mut log = fs::File::options().append(true).create(true).open(log.join("log")).unwrap();
        writeln!(log, "{}", std::process::id()).unwrap();
        work(path)
    })
}

fn write(path: &Path) -> Result<Provenance, Failure> {
    let output = OutputFile::create(path, Existing::Replace)?;
    output.file().write_all(CONTENT).unwrap();
    output.publish()?;
    Ok(Provenance { source: "docker://a".to_owned(), file_digest: None })
}

fn set_age(path: &Path, seconds: i64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    let time = Timespec { tv_sec: now - seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Not a test: the process that another test has started.
#[test]
#[ignore = "started by other tests"]
fn child_process() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let (action, directory) = task.split_once(':').unwrap();
    let directory = Path::new(directory);
    let store = Store::open(&directory.join("images")).unwrap();
    let outcome = obtain(&store, directory, &options(), |path| match action {
        "slow" => {
            std::thread::sleep(Duration::from_millis(1000));
            write(path)
        }
        "hang" => {
            let output = OutputFile::create(path, Existing::Replace)?;
            output.file().write_all(&CONTENT[..100]).unwrap();
            // Until it is killed, or told to go on.
            while !directory.join("go").exists() {
                std::thread::sleep(Duration::from_millis(10));
            }
            drop(output);
            write(path)
        }
        _ => {
            std::thread::sleep(Duration::from_millis(700));
            Err(Failure::new("host.io: 404 Not Found").about("docker://host.io/a:1").hint("look at the tag"))
        }
    });
    std::process::exit(if outcome.is_ok() { 0 } else { 3 });
}

fn check_image(fixture: &Fixture) {
    let image = fixture.store.find(&key("1")).unwrap();
    assert_eq!(fs::read(&image.path).unwrap(), CONTENT);
    let sidecar = image.sidecar.unwrap();
    assert_eq!((sidecar.size, sidecar.source.as_str()), (4096, "docker://a"));
    assert_eq!(sidecar.reference, "docker://host.io/a:1");
    assert_eq!(fixture.leftovers(), Vec::<String>::new());
}

#[test]
fn of_many_processes_one_imports() {
    let fixture = Fixture::new();
    let mut children: Vec<Child> = (0..8).map(|_| fixture.child("slow")).collect();
    fixture.wait_for_imports(1);
    fixture.obtain(&options()).unwrap();
    for child in &mut children {
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
    assert_eq!(fixture.imports(), 1);
    check_image(&fixture);
}

#[test]
fn what_is_there_is_not_imported_again_unless_that_is_wanted() {
    let fixture = Fixture::new();
    let first = fixture.obtain(&options()).unwrap();
    assert_eq!(fixture.obtain(&options()).unwrap(), first);
    assert_eq!(fixture.imports(), 1);
    fixture.obtain(&ObtainOptions { again: true, ..options() }).unwrap();
    assert_eq!(fixture.imports(), 2);
    check_image(&fixture);
}

#[test]
fn when_the_owner_is_killed_another_takes_over_at_once() {
    let fixture = Fixture::new();
    let mut owner = fixture.child("hang");
    fixture.wait_for_imports(1);
    let mut waiting = fixture.child("slow");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(fixture.imports(), 1, "as long as it lives");
    owner.kill().unwrap();
    let killed = Instant::now();
    fixture.wait_for_imports(2);
    assert!(killed.elapsed() < options().timing.silent, "nobody waits for a dead process");
    assert_eq!(waiting.wait().unwrap().code(), Some(0));
    owner.wait().unwrap();
    check_image(&fixture);
}

/// Also when its temporary file had a name.
#[test]
fn what_a_killed_owner_has_left_goes_with_the_next_import() {
    let fixture = Fixture::new();
    let path = fixture.store.path_of(&key("1"));
    let tag = crate::output::tag(path.file_name().unwrap());
    let left = fixture.store.directory().join(crate::output::temporary_name(&tag));
    fs::write(&left, "half").unwrap();
    fixture.obtain(&options()).unwrap();
    check_image(&fixture);
}

#[test]
fn when_the_owner_is_stopped_another_takes_over_after_a_while() {
    let fixture = Fixture::new();
    let mut owner = fixture.child("hang");
    fixture.wait_for_imports(1);
    let pid = Pid::from_raw(owner.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    let stopped = Instant::now();
    fixture.obtain(&options()).unwrap();
    assert!(stopped.elapsed() >= options().timing.silent - options().timing.renew, "it might go on");
    assert_eq!(fixture.imports(), 2);
    check_image(&fixture);
    // It goes on, and does no harm.
    fs::write(fixture.scratch.path().join("go"), "").unwrap();
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(owner.wait().unwrap().code(), Some(0));
    check_image(&fixture);
}

#[test]
fn who_waits_gets_the_owners_failure() {
    let fixture = Fixture::new();
    let mut owner = fixture.child("fail");
    fixture.wait_for_imports(1);
    let failure = fixture.obtain(&options()).unwrap_err();
    assert_eq!(failure.message, "docker://host.io/a:1: host.io: 404 Not Found");
    assert_eq!(failure.hint.as_deref(), Some("look at the tag"));
    assert_eq!(failure.causes.len(), 2);
    assert_eq!(fixture.imports(), 1, "nobody tries again");
    assert_eq!(owner.wait().unwrap().code(), Some(3));
    // Who comes later does.
    let begin = Instant::now();
    fixture.obtain(&options()).unwrap();
    assert!(begin.elapsed() < options().timing.silent, "at once");
    assert_eq!(fixture.imports(), 2);
    check_image(&fixture);
}

#[test]
fn the_tasks_of_a_job_fail_together() {
    let fixture = Fixture::new();
    let of_job = |job: &str| ObtainOptions { group: Some(job.to_owned()), ..options() };
    let fail = |_: &Path| Err(Failure::new("no such image"));
    let obtain = |options: &ObtainOptions| obtain(&fixture.store, fixture.scratch.path(), options, fail);
    for _ in 0..3 {
        assert_eq!(obtain(&of_job("7.0")).unwrap_err().message, "no such image");
    }
    assert_eq!(fixture.imports(), 1);
    assert!(obtain(&of_job("8.0")).is_err() && obtain(&options()).is_err());
    assert_eq!(fixture.imports(), 3, "another job, or somebody without one");
    // Much later the job may try again.
    assert!(obtain(&of_job("8.0")).is_err());
    set_age(&fixture.lease(), 700);
    assert!(obtain(&of_job("8.0")).is_err());
    assert_eq!(fixture.imports(), 5);
}

/// A lease of another machine, of which nobody here can tell whether its owner lives.
fn foreign_lease(fixture: &Fixture) {
    let owner = serde_json::json!({
        "host": "far\u{1b}[31m", "pid": 77, "started": 1, "boot": "elsewhere", "pid_namespace": "pid:[1]", "nanoseconds": 5,
    });
    let record = serde_json::json!({ "owner": owner, "group": null, "failure": null });
    fs::write(fixture.lease(), record.to_string()).unwrap();
}

#[test]
fn clocks_of_other_machines_do_not_matter() {
    std::thread::scope(|scope| {
        for ahead in [-300, 0, 300, 100_000] {
            scope.spawn(move || renewed_by_a_clock_that_is(ahead));
        }
    });
}

fn renewed_by_a_clock_that_is(ahead: i64) {
    let fixture = Fixture::new();
    foreign_lease(&fixture);
    set_age(&fixture.lease(), -ahead);
    let lease = fixture.lease();
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| {
            for second in 0..3 {
                set_age(&lease, -ahead - second);
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        fixture.obtain(&options()).unwrap();
        assert!(owner.is_finished(), "ahead by {ahead}: it was alive");
    });
    check_image(&fixture);
}

#[test]
fn an_old_lease_is_nobodys() {
    let fixture = Fixture::new();
    foreign_lease(&fixture);
    set_age(&fixture.lease(), 700);
    let begin = Instant::now();
    fixture.obtain(&options()).unwrap();
    assert!(begin.elapsed() < options().timing.silent);
    check_image(&fixture);
}

#[test]
fn waiting_has_an_end_and_names_the_owner() {
    let fixture = Fixture::new();
    foreign_lease(&fixture);
    let failure =
        fixture.obtain(&ObtainOptions { patience: Duration::from_millis(200), ..options() }).unwrap_err();
    assert_eq!(
        failure.message,
        "docker://host.io/a:1: process 77 on far\\u{1b}[31m is still importing it after 0 minutes"
    );
    assert!(failure.hint.unwrap().contains(".mizzen-lease-linux-amd64_v1_"));
    assert_eq!(fixture.imports(), 0);
}

#[test]
fn a_lease_full_of_garbage_is_taken_over() {
    let garbage = ["", "{", "null", "{\"owner\": 5}", &"x".repeat(100_000), "\0\u{7f}"];
    std::thread::scope(|scope| {
        for text in garbage {
            scope.spawn(move || {
                let fixture = Fixture::new();
                fs::write(fixture.lease(), text).unwrap();
                let begin = Instant::now();
                fixture.obtain(&options()).unwrap();
                assert!(
                    begin.elapsed() >= options().timing.silent,
                    "it may be one that is just being written"
                );
                check_image(&fixture);
            });
        }
    });
    let fixture = Fixture::new();
    symlink("nowhere", fixture.lease()).unwrap();
    fixture.obtain(&options()).unwrap();
    check_image(&fixture);
    let fixture = Fixture::new();
    fs::create_dir(fixture.lease()).unwrap();
    let failure = fixture.obtain(&options()).unwrap_err();
    assert!(failure.message.contains("cannot take the lease over: Is a directory"), "{failure}");
}

#[test]
fn who_died_while_taking_over_stops_nobody() {
    let fixture = Fixture::new();
    foreign_lease(&fixture);
    set_age(&fixture.lease(), 700);
    let guard = format!("{}.takeover", fixture.lease().display());
    fs::write(&guard, "").unwrap();
    fixture.obtain(&options()).unwrap();
    check_image(&fixture);
}

#[test]
fn another_reference_of_the_same_image_is_a_second_name() {
    let fixture = Fixture::new();
    let first = fixture.obtain(&options()).unwrap();
    let never = |_: &Path| -> Result<Provenance, Failure> { Err(Failure::new("imported again")) };
    let second = fixture.store.obtain(&key("2"), &options(), never).unwrap();
    assert_ne!(first.path, second.path);
    assert_eq!(fs::metadata(&first.path).unwrap().ino(), fs::metadata(&second.path).unwrap().ino());
    assert_eq!(second.sidecar.unwrap().reference, "docker://host.io/a:2");
    fixture.store.remove(&first.path).unwrap();
    assert_eq!(fs::read(&second.path).unwrap(), CONTENT);
}

#[test]
fn what_is_not_as_it_was_made_is_imported_again() {
    /// What is wrong with a file, and how it comes about.
    type Spoiler = (&'static str, fn(&Path));
    let spoilers: [Spoiler; 5] = [
        ("cut", |path| fs::write(path, &CONTENT[..100]).unwrap()),
        ("for others to write", |path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o664)).unwrap();
        }),
        ("a link", |path| {
            fs::rename(path, path.with_extension("other")).unwrap();
            symlink(path.with_extension("other"), path).unwrap();
        }),
        ("gone", |path| fs::remove_file(path).unwrap()),
        ("empty, and nothing is known of it", |path| {
            fs::write(path, "").unwrap();
            fs::remove_file(sidecar::path_of(path)).unwrap();
        }),
    ];
    for (what, spoil) in spoilers {
        let fixture = Fixture::new();
        let image = fixture.obtain(&options()).unwrap();
        spoil(&image.path);
        assert_eq!(fixture.store.find(&key("1")), None, "{what}");
        fixture.obtain(&options()).unwrap();
        assert_eq!(fixture.imports(), 2, "{what}");
        check_image(&fixture);
    }
}

/// What an importer leaves that is killed between its last steps.
#[test]
fn an_image_of_which_nothing_is_known_is_good() {
    let fixture = Fixture::new();
    let image = fixture.obtain(&options()).unwrap();
    for broken in [None, Some("{"), Some("")] {
        let _ = fs::remove_file(sidecar::path_of(&image.path));
        if let Some(text) = broken {
            fs::write(sidecar::path_of(&image.path), text).unwrap();
        }
        assert_eq!(fixture.store.find(&key("1")).unwrap().sidecar, None);
        let found = fixture.obtain(&options()).unwrap();
        assert_eq!(
            (&found.path, found.sidecar.unwrap().source.as_str()),
            (&image.path, "docker://host.io/a:1")
        );
    }
    assert_eq!(fixture.imports(), 1);
}

#[test]
fn use_is_remembered() {
    let fixture = Fixture::new();
    let image = fixture.obtain(&options()).unwrap();
    let sidecar = sidecar::path_of(&image.path);
    for path in [&image.path, &sidecar] {
        set_age(path, 5000);
    }
    let age = |time: SystemTime| SystemTime::now().duration_since(time).unwrap().as_secs();
    assert!(age(super::last_used(&image.path).unwrap()) >= 4999);
    fixture.store.find(&key("1")).unwrap();
    assert!(age(super::last_used(&image.path).unwrap()) < 100);
    assert!(Sidecar::read(&image.path).is_some());
}

#[test]
fn the_store_is_the_users_own() {
    let scratch = Scratch::new();
    let directory = scratch.path().join("share/mizzen/images");
    assert!(Store::open_existing(&directory).unwrap().is_none());
    Store::open(&directory).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(&directory), mode(directory.parent().unwrap()) & 0o700), (0o700, 0o700));
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(Store::open(&directory).is_ok(), "others may read it");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o775)).unwrap();
    let failure = Store::open(&directory).unwrap_err();
    assert!(failure.message.ends_with("the image store can be written by others (mode 0775)"), "{failure}");
    assert_eq!(failure.hint.unwrap(), format!("chmod go-w {}", directory.display()));
    fs::remove_dir(&directory).unwrap();
    fs::write(&directory, "").unwrap();
    let failure = Store::open(&directory).unwrap_err();
    assert!(failure.message.ends_with("the image store is not a directory"), "{failure}");
    let failure = Store::open(Path::new("/proc/no/images")).unwrap_err();
    assert_eq!(failure.message, "/proc/no/images: cannot make the image store: No such file or directory");
}

#[test]
fn what_crashes_have_left_goes_after_a_day() {
    let fixture = Fixture::new();
    let image = fixture.obtain(&options()).unwrap();
    foreign_lease(&fixture);
    let orphan = fixture.store.directory().join(format!("{}.json", key("3").file_name()));
    let others = fixture.store.directory().join("notes.json");
    for path in [&orphan, &others] {
        fs::write(path, "{}").unwrap();
    }
    assert_eq!(fixture.store.sweep(), 0);
    for path in [&orphan, &others, &fixture.lease(), &image.path, &sidecar::path_of(&image.path)] {
        set_age(path, 25 * 3600);
    }
    assert_eq!(fixture.store.sweep(), 2);
    assert!(others.exists() && !orphan.exists());
    check_image(&fixture);
}

/// The test of tests: a process that was killed is seen as that.
#[test]
fn a_child_does_what_it_is_told() {
    let fixture = Fixture::new();
    let mut child = fixture.child("hang");
    fixture.wait_for_imports(1);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
}
