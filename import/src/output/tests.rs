//! Files that appear as a whole, or not at all.

use super::*;
use crate::store::testing::Scratch;
use rustix::fs::{Timespec, Timestamps, utimensat};
use std::io::Write;
use std::os::unix::fs::symlink;

fn message(result: Result<OutputFile, Failure>) -> (String, String) {
    let failure = result.err().unwrap();
    (failure.message, failure.hint.unwrap_or_default())
}

fn age(path: &Path, seconds: i64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    let time = Timespec { tv_sec: now - seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::empty()).unwrap();
}

#[test]
fn a_file_appears_when_it_is_complete() {
    for nameless in [true, false] {
        let scratch = Scratch::new();
        let draft = Draft::create(scratch.path(), "tag", nameless).unwrap();
        draft.file().write_all(b"new").unwrap();
        assert_eq!(draft.temporary.is_some(), !nameless, "the tests' own file system has nameless files");
        assert_eq!(scratch.names().len(), usize::from(!nameless));
        draft.publish("a.sqsh".as_ref(), Existing::Refuse).unwrap();
        assert_eq!(scratch.names(), ["a.sqsh"]);
        let path = scratch.path().join("a.sqsh");
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o022, 0);

        let draft = Draft::create(scratch.path(), "tag", nameless).unwrap();
        let refused = draft.publish("a.sqsh".as_ref(), Existing::Refuse).unwrap_err();
        assert_eq!(refused.message, format!("{}: is there already", path.display()));
        assert_eq!(scratch.names(), ["a.sqsh"], "nothing is left of the other");

        let draft = Draft::create(scratch.path(), "tag", nameless).unwrap();
        draft.file().write_all(b"newer").unwrap();
        draft.publish("a.sqsh".as_ref(), Existing::Replace).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"newer");
        assert_eq!(scratch.names(), ["a.sqsh"]);

        drop(Draft::create(scratch.path(), "tag", nameless).unwrap());
        assert_eq!(scratch.names(), ["a.sqsh"], "what is given up goes");
    }
}

#[test]
fn what_would_fail_at_the_end_fails_at_the_beginning() {
    let scratch = Scratch::new();
    let directory = scratch.path();
    fs::write(directory.join("a"), "old").unwrap();
    fs::create_dir(directory.join("dir")).unwrap();
    symlink("nowhere", directory.join("link")).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(directory.join("socket")).unwrap();
    for (name, existing, expected, hint) in [
        ("a", Existing::Refuse, "is there already", "--force replaces it; -o names another file"),
        ("link", Existing::Refuse, "is there already", "--force replaces it; -o names another file"),
        ("dir", Existing::Replace, "is a directory", "write the name of the file behind it"),
        ("socket", Existing::Replace, "is a socket, and no file can take its place", ""),
        ("new/", Existing::Refuse, "not the name of a file", "write -o DIRECTORY/NAME.sqsh"),
        (
            "no/a",
            Existing::Refuse,
            "cannot open the directory: No such file or directory",
            "make it first: mkdir -p ",
        ),
        ("a/b", Existing::Refuse, "cannot write it: Not a directory", ""),
    ] {
        let (message, told) = message(OutputFile::create(&directory.join(name), existing));
        assert!(message.ends_with(expected), "{name}: {message}");
        assert!(message.starts_with(&directory.display().to_string()), "{name}: {message}");
        assert!(told.starts_with(hint), "{name}: {told}");
    }
    drop(socket);
    assert_eq!(
        message(OutputFile::create(Path::new("/dev/null"), Existing::Replace)).0,
        "/dev/null: is a character device, and no file can take its place"
    );
    assert_eq!(
        message(OutputFile::create(Path::new(".."), Existing::Replace)).0,
        "..: not the name of a file"
    );
    assert_eq!(fs::read(directory.join("a")).unwrap(), b"old");
}

#[test]
fn a_link_is_replaced_and_not_followed() {
    let scratch = Scratch::new();
    let target = scratch.path().join("target");
    fs::write(&target, "old").unwrap();
    let link = scratch.path().join("link");
    symlink("target", &link).unwrap();
    let output = OutputFile::create(&link, Existing::Replace).unwrap();
    output.file().write_all(b"new").unwrap();
    output.publish().unwrap();
    assert_eq!((fs::read(&target).unwrap(), fs::read(&link).unwrap()), (b"old".to_vec(), b"new".to_vec()));
    assert!(!fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn a_full_disk_says_what_to_do() {
    let full = |errno: Errno| write_failure(Path::new("/no/where/a.sqsh"), "cannot write it", errno.into());
    let failure = full(Errno::NOSPC);
    assert_eq!(failure.message, "/no/where/a.sqsh: cannot write it: No space left on device");
    assert!(failure.hint.unwrap().starts_with("the file system is full (df -h /no/where; df -i /no/where)"));
    let failure = full(Errno::DQUOT);
    assert_eq!(failure.message, "/no/where/a.sqsh: cannot write it: Disk quota exceeded");
    assert!(failure.hint.unwrap().starts_with("your quota there is used up"));
    assert!(full(Errno::ROFS).hint.unwrap().contains("read-only"));
    assert!(full(Errno::ACCESS).hint.unwrap().contains("write permission for the directory /no/where"));
}

#[test]
fn leftovers_go_when_nobody_can_own_them() {
    let scratch = Scratch::new();
    let directory = scratch.path();
    let old = directory.join(temporary_name("x"));
    let new = directory.join(temporary_name("x"));
    let other = directory.join("x.sqsh");
    for path in [&old, &new, &other] {
        fs::write(path, "").unwrap();
    }
    let linked = directory.join(temporary_name("x"));
    symlink(&other, &linked).unwrap();
    for path in [&old, &other] {
        age(path, 25 * 3600);
    }
    assert_eq!(sweep(directory), 1);
    assert!(!old.exists() && new.exists() && other.exists() && linked.is_symlink());
    // The next draft that needs a name does the same.
    age(&new, 25 * 3600);
    drop(Draft::create(directory, "y", false).unwrap());
    assert!(!new.exists());
    let of_file = directory.join(temporary_name(&tag("x.sqsh".as_ref())));
    fs::write(&of_file, "").unwrap();
    assert_eq!(remove_leftovers(&directory.join("y.sqsh")), 0);
    assert_eq!(remove_leftovers(&other), 1);
    assert!(!of_file.exists() && other.exists());
}

#[test]
fn the_file_systems_clock_is_read_without_a_trace() {
    let scratch = Scratch::new();
    let time = file_system_time(scratch.path()).unwrap();
    assert!(SystemTime::now().duration_since(time).unwrap_or_default() < Duration::from_secs(5));
    assert!(scratch.names().is_empty());
}

#[test]
fn no_two_temporary_names_are_alike() {
    let names: std::collections::BTreeSet<String> = (0..1000).map(|_| temporary_name("a")).collect();
    assert_eq!(names.len(), 1000);
    assert!(names.iter().all(|name| name.len() < 255 && name.starts_with(TEMPORARY)));
}
