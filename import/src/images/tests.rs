//! What users see of their images, and what they remove.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Instant;

use mizzen_core::Digest;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use super::*;
use crate::store::key::ImageKey;
use crate::store::select::latest;
use crate::store::sidecar::{self, Provenance, Sidecar};
use crate::store::testing::Scratch;

/// As small as a squashfs can be, as far as its first bytes tell.
fn squashfs() -> Vec<u8> {
    let mut image = b"hsqs".to_vec();
    image.resize(1_500_000, 0);
    image
}

fn key(reference: &str, digest: u8) -> ImageKey {
    ImageKey {
        reference: reference.to_owned(),
        digest: Digest::new([digest; 32]),
        platform: "linux/amd64".to_owned(),
        writer: "v1".to_owned(),
        suffix: "sqsh",
    }
}

struct Fixture {
    scratch: Scratch,
    store: Store,
}

impl Fixture {
    fn new() -> Fixture {
        let scratch = Scratch::new();
        let store = Store::open(&scratch.path().join("store")).unwrap();
        Fixture { scratch, store }
    }

    /// An image that was made and used so many days ago.
    fn add(&self, reference: &str, digest: u8, days: i64) -> PathBuf {
        let key = key(reference, digest);
        let path = self.store.path_of(&key);
        fs::write(&path, squashfs()).unwrap();
        let provenance =
            Provenance { source: reference.to_owned(), file_digest: Some(Digest::new([digest + 100; 32])) };
        let mut sidecar = Sidecar::new(&key, &provenance, 1_500_000);
        sidecar.created -= days as u64 * 86_400;
        sidecar.write(&path).unwrap();
        for path in [&path, &sidecar::path_of(&path)] {
            set_age(path, days * 86_400);
        }
        path
    }

    fn remove(&self, word: &str) -> Result<Outcome, Failure> {
        remove(&self.store, &[word.to_owned()], false)
    }

    fn left(&self) -> usize {
        fs::read_dir(self.store.directory()).unwrap().count()
    }
}

fn set_age(path: &Path, seconds: i64) {
    let now = super::seconds(SystemTime::now()) as i64;
    let time = Timespec { tv_sec: now - seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::empty()).unwrap();
}

const UBUNTU: &str = "docker://docker.io/library/ubuntu:24.04";
const TORCH: &str = "docker://nvcr.io/nvidia/pytorch:24.01-py3";

#[test]
fn folders_and_store_are_shown() {
    let fixture = Fixture::new();
    fixture.add(UBUNTU, 1, 3);
    let plain = fixture.add(TORCH, 2, 0);
    fs::write(sidecar::path_of(&plain), "broken").unwrap();
    fs::write(fixture.store.directory().join("notes.txt"), "not an image").unwrap();
    fs::write(fixture.store.directory().join(".mizzen-tmp-x"), squashfs()).unwrap();
    fs::write(fixture.store.directory().join("mine.sqsh"), squashfs()).unwrap();
    let folder = fixture.scratch.path().join("sw");
    fs::create_dir_all(folder.join("debian/usr")).unwrap();
    fs::create_dir_all(folder.join("not-an-image/x")).unwrap();
    fs::write(folder.join("tf.sqsh"), squashfs()).unwrap();
    symlink("tf.sqsh", folder.join("current.sqsh")).unwrap();
    symlink("nowhere", folder.join("dangling.sqsh")).unwrap();
    fs::write(folder.join("evil\u{1b}[31m.sqsh"), squashfs()).unwrap();
    let missing = fixture.scratch.path().join("missing");
    let outcome = show(&[missing, folder], fixture.store.directory());
    let root = fixture.scratch.path().display();
    let expected = format!(
        "\
{root}/missing: cannot be read: No such file or directory
      1.5 MB  AGE        -             -              current.sqsh
   directory  AGE        -             -              debian
      1.5 MB  AGE        -             -              evil\\u{{1b}}[31m.sqsh
      1.5 MB  AGE        -             -              tf.sqsh
{root}/sw: 4 images, 3.0 MB
      1.5 MB  3 days     010101010101  linux/amd64    docker://docker.io/library/ubuntu:24.04
      1.5 MB  AGE        -             -              mine.sqsh
      1.5 MB  AGE        020202020202  linux/amd64    docker://nvcr.io/nvidia/pytorch:24.01-py3
{root}/store: 3 images, 4.5 MB
"
    );
    let same_age = with_one_age(&outcome.text);
    assert_eq!(same_age, expected, "{}", outcome.text);
    let images = &outcome.json["store"]["images"];
    assert_eq!(images[0]["reference"], UBUNTU);
    assert_eq!(images[0]["manifest_digest"], Digest::new([1; 32]).to_string());
    assert_eq!(images[0]["digest"], Digest::new([101; 32]).to_string());
    assert_eq!((images[0]["size"].as_u64(), images[2]["digest"].is_null()), (Some(1_500_000), true));
    assert_eq!(outcome.json["folders"][0]["problem"], "No such file or directory");
    assert_eq!(outcome.json["folders"][1]["images"][1]["format"], "directory");
    assert!(outcome.json["folders"][1]["images"][1]["size"].is_null());
}

/// Ages of some seconds, which nobody can foretell, as one word.
fn with_one_age(text: &str) -> String {
    let line = |line: &str| match line.find(" s   ") {
        Some(at) if line.starts_with(' ') => {
            let begin = line[..at].rfind(' ').unwrap() + 1;
            let end = begin + 9;
            format!("{}AGE      {}\n", &line[..begin], &line[end..])
        }
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[test]
fn a_site_sees_where_its_images_come_from() {
    let fixture = Fixture::new();
    let folder = fixture.scratch.path().join("sw");
    fs::create_dir(&folder).unwrap();
    let path = folder.join("torch.sqsh");
    fs::write(&path, squashfs()).unwrap();
    Sidecar::new(&key(TORCH, 3), &Provenance::default(), 1_500_000).write(&path).unwrap();
    let outcome = show(&[folder], &fixture.scratch.path().join("no-store"));
    assert!(
        outcome.text.contains(&format!("030303030303  linux/amd64    torch.sqsh  ({TORCH})")),
        "{}",
        outcome.text
    );
    assert!(outcome.text.ends_with("no-store: 0 images, 0.0 MB\n"), "{}", outcome.text);
}

#[test]
fn images_are_removed_by_whatever_names_them() {
    let digest = Digest::new([1; 32]);
    let of_file = Digest::new([101; 32]);
    let file = key(UBUNTU, 1).file_name();
    for word in [
        UBUNTU,
        "docker://ubuntu:24.04",
        "ubuntu:24.04",
        "library/ubuntu:24.04",
        "docker.io/library/ubuntu:24.04",
        "docker.io#library/ubuntu:24.04",
        &format!("ubuntu:24.04@{digest}"),
        &format!("ubuntu@{digest}"),
        &digest.to_string(),
        &digest.hex(),
        &digest.hex()[..12],
        &of_file.to_string(),
        &file,
        "PATH",
    ] {
        let fixture = Fixture::new();
        let path = fixture.add(UBUNTU, 1, 0);
        fixture.add(TORCH, 2, 0);
        let word = word.replace("PATH", &path.display().to_string());
        let outcome = fixture.remove(&word).unwrap_or_else(|failure| panic!("{word}: {failure}"));
        let store = fixture.store.directory().display();
        assert_eq!(outcome.text, format!("{UBUNTU} {digest}: removed\n{store}: 1.5 MB freed\n"), "{word}");
        assert_eq!((path.exists(), fixture.left()), (false, 2), "{word}");
    }
}

#[test]
fn what_is_not_there_is_not_removed() {
    let fixture = Fixture::new();
    fixture.add(UBUNTU, 0x11, 0);
    fixture.add(TORCH, 0x11, 0);
    fixture.add("docker://a.io/b:c", 0x12, 0);
    for word in [
        "ubuntu",
        "ubuntu:22.04",
        "1111111",
        "sha256:11",
        "00000000",
        "../x",
        "",
        &format!("ubuntu:24.04@{}", Digest::new([9; 32])),
    ] {
        let failure = fixture.remove(word).err().unwrap();
        assert_eq!(failure.message, format!("{word}: no such image in your store"));
        assert_eq!(
            failure.hint.as_deref(),
            Some("`mizzen images` shows all with their references and digests")
        );
    }
    assert_eq!(fixture.left(), 6);
    let one = fixture.remove("11111111").unwrap();
    assert_eq!(one.json["images"].as_array().unwrap().len(), 2, "one image under two names");
}

#[test]
fn a_beginning_that_several_digests_have_is_refused() {
    let fixture = Fixture::new();
    let mut similar = [0x11; 32];
    fixture.add(UBUNTU, 0x11, 0);
    similar[31] = 0;
    let other = ImageKey { digest: Digest::new(similar), ..key(TORCH, 0) };
    fs::write(fixture.store.path_of(&other), squashfs()).unwrap();
    let failure = fixture.remove("1111111111").err().unwrap();
    assert_eq!(failure.message, "1111111111: the digests of 2 images begin so");
    assert!(fixture.remove(&Digest::new([0x11; 32]).hex()).is_ok());
}

#[test]
fn all_that_was_imported_can_be_removed() {
    let fixture = Fixture::new();
    fixture.add(UBUNTU, 1, 0);
    let first = fixture.add(TORCH, 2, 0);
    fs::write(fixture.store.directory().join("mine.sqsh"), squashfs()).unwrap();
    // A second name of the same file.
    let again = fixture.store.path_of(&key("docker://a.io/b:c", 2));
    fs::hard_link(&first, &again).unwrap();
    let outcome = remove(&fixture.store, &[], true).unwrap();
    assert!(outcome.text.ends_with(": 3.0 MB freed\n"), "{}", outcome.text);
    assert_eq!(fixture.left(), 1, "what the user has put there stays");
    fixture.remove("mine.sqsh").unwrap();
    assert_eq!(fixture.left(), 0);
}

#[test]
fn what_was_not_used_for_long_goes() {
    let days = |days: u64| Duration::from_secs(days * 86_400);
    /// Options, and the references and digests that are left.
    type Case<'a> = (Duration, usize, &'a [u8]);
    let cases: [Case; 6] = [
        (days(30), 0, &[2, 3]),
        (days(30), 1, &[2, 3, 4]),
        (days(5), 1, &[3, 4]),
        (days(5), 2, &[2, 3, 4, 5]),
        (days(500), 0, &[1, 2, 3, 4, 5]),
        (days(0), 0, &[]),
    ];
    for (older_than, keep, left) in cases {
        let fixture = Fixture::new();
        for (reference, digest, age) in
            [(UBUNTU, 1, 90), (UBUNTU, 2, 20), (UBUNTU, 3, 1), (TORCH, 4, 50), (TORCH, 5, 100)]
        {
            fixture.add(reference, digest, age);
        }
        let mine = fixture.store.directory().join("mine.sqsh");
        fs::write(&mine, squashfs()).unwrap();
        set_age(&mine, 1_000_000_000);
        let dry = prune(&fixture.store, older_than, keep, true).unwrap();
        assert_eq!(fixture.left(), 11, "nothing has gone");
        let outcome = prune(&fixture.store, older_than, keep, false).unwrap();
        let there = |digest: &u8| {
            [UBUNTU, TORCH].iter().any(|name| fixture.store.path_of(&key(name, *digest)).exists())
        };
        let found: Vec<u8> = (1..6).filter(there).collect();
        assert_eq!(found, left, "{older_than:?} {keep}");
        assert_eq!(outcome.json["images"].as_array().unwrap().len(), 5 - left.len());
        assert_eq!(dry.json["images"], outcome.json["images"]);
        assert!(mine.exists());
    }
}

#[test]
fn of_each_tag_the_last_image_is_looked_up() {
    let fixture = Fixture::new();
    for (reference, digest, age) in [(UBUNTU, 1, 90), (UBUNTU, 3, 1), (UBUNTU, 2, 20), (TORCH, 5, 100)] {
        fixture.add(reference, digest, age);
    }
    fs::write(fixture.store.directory().join("mine.sqsh"), squashfs()).unwrap();
    let images = stored(&fixture.store).unwrap();
    let found: Vec<_> = latest(&images).iter().map(|image| image.manifest_digest).collect();
    assert_eq!(found, [3, 5].map(|digest| Some(Digest::new([digest; 32]))));
}

/// A file that was put in the place of another one has not its origin.
#[test]
fn what_is_known_of_another_file_is_not_shown() {
    let fixture = Fixture::new();
    let folder = fixture.scratch.path().join("sw");
    fs::create_dir(&folder).unwrap();
    let path = folder.join("torch.sqsh");
    fs::write(&path, squashfs()).unwrap();
    Sidecar::new(&key(TORCH, 3), &Provenance::default(), 99).write(&path).unwrap();
    let outcome = show(&[folder], fixture.store.directory());
    assert!(!outcome.text.contains(TORCH), "{}", outcome.text);
}

#[test]
fn a_large_store_is_shown_in_no_time() {
    let fixture = Fixture::new();
    for number in 0..10_000_u32 {
        let mut digest = [0; 32];
        digest[..4].copy_from_slice(&number.to_be_bytes());
        let key = ImageKey { digest: Digest::new(digest), ..key(UBUNTU, 0) };
        fs::write(fixture.store.path_of(&key), b"hsqs").unwrap();
    }
    let begin = Instant::now();
    let outcome = show(&[], fixture.store.directory());
    println!("10,000 images are shown in {:?}", begin.elapsed());
    assert_eq!(outcome.json["store"]["images"].as_array().unwrap().len(), 10_000);
    assert!(begin.elapsed() < Duration::from_secs(20));
}
