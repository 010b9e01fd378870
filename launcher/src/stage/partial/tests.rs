use super::record::decode;
use super::*;
use crate::image::testing::Scratch;
use crate::stage::apart::copy_apart;
use crate::stage::fetch::{Comparison, Fetched, Fetcher, Stopped, compare};
use crate::stage::fill::{Filler, Pace, Silent, Unfilled};

const SIZE: u64 = 5 * CHUNK + 77;
const UNLIMITED: Limits = Limits { max_size: None, keep_free: None };

fn content() -> Vec<u8> {
    (0..SIZE).map(|i| (i ^ (i >> 9) ^ (i >> 17)) as u8).collect()
}

/// A cache, and an original in the same directory.
fn cache_and_original() -> (Scratch, Cache, File) {
    let scratch = Scratch::new();
    let original = File::open(scratch.file("original", content())).unwrap();
    let cache = Cache::open(scratch.path()).unwrap();
    (scratch, cache, original)
}

fn source<'a>(original: &'a File, path: &'a std::path::Path) -> SourceImage<'a> {
    SourceImage { path, file: original, identity: FileIdentity::of(original).unwrap(), verify: false }
}

fn begun(cache: &Cache, original: &File) -> Partial {
    let source = source(original, std::path::Path::new("/shared/original"));
    Partial::open_or_begin(cache, &source, &Limits::default()).unwrap()
}

fn marks(partial: &Partial) -> Vec<u8> {
    partial.marks(0..chunks(SIZE)).unwrap()
}

#[test]
fn what_is_kept_is_there_for_the_next_one() {
    let (_scratch, cache, original) = cache_and_original();
    let content = content();
    let partial = begun(&cache, &original);
    assert_eq!((marks(&partial), partial.present()), (vec![MISSING; 6], 0));
    partial.keep(1..3, &content[CHUNK as usize..3 * CHUNK as usize]).unwrap();
    partial.keep(5..6, &content[5 * CHUNK as usize..]).unwrap();
    assert_eq!(partial.present(), 2 * CHUNK + 77);
    drop(partial);
    let again = begun(&cache, &original);
    assert_eq!(marks(&again), b"\0ww\0\0w");
    let mut read = vec![0; 2 * CHUNK as usize];
    again.data.read_exact_at(&mut read, CHUNK).unwrap();
    assert!(read == content[CHUNK as usize..3 * CHUNK as usize]);
    again.sync().unwrap();
    assert_eq!(marks(&again), b"\0DD\0\0D");
    let listed = list(&cache).unwrap();
    let [one] = listed.as_slice() else { panic!("{} are listed", listed.len()) };
    assert_eq!((one.source.as_str(), one.size, one.present), ("/shared/original", SIZE, 2 * CHUNK + 77));
}

#[test]
fn in_another_boot_only_what_was_on_disk_counts() {
    let (_scratch, cache, original) = cache_and_original();
    let partial = begun(&cache, &original);
    partial.keep(0..1, &[1; CHUNK as usize]).unwrap();
    partial.sync().unwrap();
    partial.keep(1..2, &[1; CHUNK as usize]).unwrap();
    assert_eq!(marks(&partial), b"Dw\0\0\0\0");
    let path = cache.path.join(&partial.name).join(RECORD);
    let mut bytes = std::fs::read(&path).unwrap();
    let (head, _) = decode(&bytes).unwrap();
    let other = head.in_boot("00000000-0000-0000-0000-000000000000".to_owned()).encode().unwrap();
    bytes[..other.len()].copy_from_slice(&other);
    std::fs::write(&path, &bytes).unwrap();
    drop(partial);
    assert_eq!(list(&cache).unwrap()[0].present, CHUNK, "also for those who only look");
    assert_eq!(marks(&begun(&cache, &original)), b"D\0\0\0\0\0");
    assert_eq!(decode(&std::fs::read(&path).unwrap()).unwrap().0.boot, boot());
}

#[test]
fn a_record_that_is_none_is_set_aside() {
    let (_scratch, cache, original) = cache_and_original();
    let name = begun(&cache, &original).name;
    let directory = cache.path.join(&name);
    type Damage<'a> = &'a dyn Fn();
    let damages: [(&str, Damage); 6] = [
        ("short", &|| {
            File::options().write(true).open(directory.join(RECORD)).unwrap().set_len(4099).unwrap()
        }),
        ("empty", &|| std::fs::write(directory.join(RECORD), "").unwrap()),
        ("of another file", &|| {
            let text = std::fs::read(directory.join(RECORD)).unwrap();
            let other =
                String::from_utf8_lossy(&text).replacen("\"ino\":", "\"ino\":1", 1).replacen('\0', "", 1);
            std::fs::write(directory.join(RECORD), other).unwrap();
        }),
        ("no record", &|| std::fs::remove_file(directory.join(RECORD)).unwrap()),
        ("no data", &|| std::fs::remove_file(directory.join(DATA)).unwrap()),
        ("data of another size", &|| {
            File::options().write(true).open(directory.join(DATA)).unwrap().set_len(SIZE - 1).unwrap();
        }),
    ];
    for (what, damage) in damages {
        let partial = begun(&cache, &original);
        partial.keep(0..1, &[1; CHUNK as usize]).unwrap();
        drop(partial);
        damage();
        assert_eq!(marks(&begun(&cache, &original)), vec![MISSING; 6], "{what}");
    }
    // Whoever makes room for the next one removes it.
    assert!(cache.names(BROKEN).unwrap().is_empty());
}

#[test]
fn a_chunk_has_one_writer() {
    let (_scratch, cache, original) = cache_and_original();
    let one = begun(&cache, &original);
    let other = one.reopen().unwrap();
    assert!(one.try_lock(2) && !other.try_lock(2) && other.try_lock(3));
    one.unlock(2);
    assert!(other.try_lock(2));
    drop(other);
    assert!(one.try_lock(2) && one.try_lock(3), "a lock ends with its holder");
}

#[test]
fn what_is_in_use_stays() {
    let (_scratch, cache, original) = cache_and_original();
    let partial = begun(&cache, &original);
    let limits = Limits { max_size: Some(mizzen_core::staging::Amount::Bytes(SIZE + 10)), keep_free: None };
    let Err(why) = evict::reserve(&cache, 100, 0, &limits) else { panic!("it is in use") };
    assert!(why.starts_with("no room for 0.0 MB in "), "{why}");
    assert!(!remove_unused(&cache, &partial.name));
    drop(partial);
    assert!(evict::reserve(&cache, 100, 0, &limits).is_ok());
    assert!(cache.names(PARTIAL).unwrap().is_empty());
}

#[test]
fn a_demand_is_kept_and_forward_readers_get_more() {
    let (_scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let fetcher =
        Fetcher::new(begun(&cache, &original).reopen().unwrap(), original, identity, &cache, &UNLIMITED);
    assert_eq!(fetcher.demand(chunks_of(CHUNK, 1)), Fetched::Kept);
    assert_eq!(marks(&fetcher.partial), b"\0w\0\0\0\0");
    assert_eq!(fetcher.demand(chunks_of(2 * CHUNK, 1)), Fetched::Kept);
    assert_eq!(marks(&fetcher.partial), b"\0www\0\0", "two at once");
    let mut read = vec![0; SIZE as usize];
    fetcher.partial.data.read_exact_at(&mut read, 0).unwrap();
    assert!(read[CHUNK as usize..4 * CHUNK as usize] == content()[CHUNK as usize..4 * CHUNK as usize]);
}

#[test]
fn nothing_of_a_changed_original_is_kept() {
    let (scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let fetcher =
        Fetcher::new(begun(&cache, &original).reopen().unwrap(), original, identity, &cache, &UNLIMITED);
    assert_eq!(fetcher.demand(0..1), Fetched::Kept);
    std::thread::sleep(Duration::from_millis(20));
    File::options().write(true).open(scratch.path().join("original")).unwrap().write_all_at(b"x", 9).unwrap();
    assert_eq!(fetcher.demand(1..2), Fetched::Changed);
    assert_eq!(fetcher.stopped(), Some(Stopped::Changed));
    assert_eq!(marks(&fetcher.partial), b"w\0\0\0\0\0");
}

#[test]
fn a_stopped_holder_of_a_chunk_is_not_waited_for_for_ever() {
    let (_scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let partial = begun(&cache, &original);
    let fetcher = Fetcher::new(partial.reopen().unwrap(), original, identity, &cache, &UNLIMITED);
    assert!(partial.try_lock(0));
    let begin = std::time::Instant::now();
    assert_eq!(fetcher.demand(0..1), Fetched::Unkept(0));
    assert!((250..10_000).contains(&begin.elapsed().as_millis()), "{:?}", begin.elapsed());
}

#[test]
fn a_complete_one_becomes_a_copy() {
    let (_scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let partial = begun(&cache, &original);
    let reader = partial.open_read_only().unwrap();
    let limits = Limits::default();
    let fetcher = Fetcher::new(
        partial.reopen().unwrap(),
        original.try_clone().unwrap(),
        identity.clone(),
        &cache,
        &UNLIMITED,
    );
    assert_eq!(fetcher.demand(3..4), Fetched::Kept);
    let source = source(&original, std::path::Path::new("/shared/original"));
    let filler =
        Filler { fetcher: &fetcher, cache: &cache, source: &source, limits: &limits, pace: Pace::Foreground };
    filler.run(&mut Silent).unwrap();
    let (copy, digest) = cache.find(&identity).unwrap();
    assert_eq!(std::fs::read(cache.copy_path(digest)).unwrap(), content());
    assert!(cache.names(PARTIAL).unwrap().is_empty() && cache.names(BROKEN).unwrap().is_empty());
    // Who has it open goes on with the copy, and keeps it.
    assert_eq!(fstat(&copy).unwrap().st_ino, fstat(&reader.0).unwrap().st_ino);
    assert!(marks_in(&reader.1, 0..6).unwrap().iter().all(|mark| is_good(*mark)));
    // The next one has nothing to do.
    filler.run(&mut Silent).unwrap();
}

/// Marks are of no worth when the disk could not write, in every process that has the record open.
#[test]
fn a_void_one_is_used_by_nobody() {
    let (_scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let one = begun(&cache, &original);
    let (_, record) = one.open_read_only().unwrap();
    let fetcher =
        Fetcher::new(one.reopen().unwrap(), original.try_clone().unwrap(), identity, &cache, &UNLIMITED);
    assert_eq!(fetcher.demand(0..2), Fetched::Kept);
    assert_eq!((one.void(), void_in(&record)), (None, None));
    one.make_void(Void::Lost(libc::ENOSPC));
    let void = Some(Void::Lost(libc::ENOSPC));
    assert_eq!((one.void(), void_in(&record)), (void, void));
    assert_eq!(fetcher.demand(0..1), Fetched::Unkept(0), "it is marked all the same");
    assert_eq!(fetcher.stopped(), void.map(Stopped::Void));
    // Nobody goes on with it.
    assert_eq!(marks(&begun(&cache, &original)), vec![MISSING; 6]);
    // A record that is gone is as good as void.
    record_of(&one).set_len(0).unwrap();
    assert_eq!(void_in(&record), Some(Void::Lost(libc::EIO)));
}

fn record_of(partial: &Partial) -> File {
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&partial.record));
    File::options().write(true).open(path).unwrap()
}

/// What has another mode, name or link is not another image; but its time of change does not tell that from a write whose time of
/// modification was set back.
#[test]
fn of_a_touched_original_nothing_is_kept() {
    let (scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let fetcher = Fetcher::new(
        begun(&cache, &original).reopen().unwrap(),
        original.try_clone().unwrap(),
        identity.clone(),
        &cache,
        &UNLIMITED,
    );
    assert_eq!(fetcher.demand(0..1), Fetched::Kept);
    std::thread::sleep(Duration::from_millis(20));
    let path = scratch.path().join("original");
    std::fs::rename(&path, scratch.path().join("old")).unwrap();
    assert_eq!(compare(&original, &identity), Comparison::Touched);
    assert_eq!(fetcher.demand(1..2), Fetched::Unkept(0));
    assert_eq!(fetcher.stopped(), Some(Stopped::Void(Void::Touched)));
    assert_eq!(
        (marks(&fetcher.partial), fetcher.demand(0..1)),
        (b"w\0\0\0\0\0".to_vec(), Fetched::Unkept(0))
    );
    // Without a name it is what it was, for those who have it open.
    std::fs::remove_file(scratch.path().join("old")).unwrap();
    assert_eq!(compare(&original, &identity), Comparison::Same);
}

#[test]
fn why_a_record_is_void_is_one_byte() {
    for (void, cause) in [
        (Void::Lost(libc::EDQUOT), "Disk quota exceeded"),
        (Void::Touched, "its times, names or mode were changed meanwhile"),
    ] {
        assert_eq!(Void::decode(void.encode()), Some(void));
        assert_eq!(void.cause(), cause);
    }
    assert_eq!(Void::decode(0), None);
    // Whatever has no number of its own there.
    assert_eq!([0, 255, 512].map(|errno| Void::Lost(errno).encode()), [libc::EIO as u8; 3]);
}

/// A suspended job's copier keeps the locks of what it was fetching. Whoever waits for the whole copy makes it all the same.
#[test]
fn what_a_stopped_process_has_under_way_is_copied_apart() {
    let (_scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let stopped = begun(&cache, &original);
    assert!(stopped.try_lock(2));
    let limits = Limits::default();
    let fetcher = Fetcher::new(
        stopped.reopen().unwrap(),
        original.try_clone().unwrap(),
        identity.clone(),
        &cache,
        &UNLIMITED,
    );
    assert_eq!(fetcher.demand(3..4), Fetched::Kept);
    let source = source(&original, std::path::Path::new("/shared/original"));
    let filler =
        Filler { fetcher: &fetcher, cache: &cache, source: &source, limits: &limits, pace: Pace::Foreground };
    let begin = std::time::Instant::now();
    filler.run(&mut Silent).unwrap();
    assert!((4..60).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
    let (copy, digest) = cache.find(&identity).unwrap();
    assert_eq!(std::fs::read(cache.copy_path(digest)).unwrap(), content());
    assert!(cache.names(PARTIAL).unwrap().is_empty());
    // When the other one goes on, the copy is not what it writes to.
    assert_ne!(fstat(&copy).unwrap().st_ino, fstat(&stopped.data).unwrap().st_ino);
}

/// Of what nobody has synced, nobody knows whether the disk has it.
#[test]
fn what_is_copied_apart_is_on_disk_first() {
    let (_scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let source = source(&original, std::path::Path::new("/shared/original"));
    let fetcher = |original: &File| {
        let partial = begun(&cache, original).reopen().unwrap();
        Fetcher::new(partial, original.try_clone().unwrap(), identity.clone(), &cache, &UNLIMITED)
    };
    let filler = |fetcher| {
        copy_apart(
            &Filler { fetcher, cache: &cache, source: &source, limits: &UNLIMITED, pace: Pace::Foreground },
            &mut Silent,
        )
    };
    let kept = fetcher(&original);
    assert_eq!(kept.demand(1..3), Fetched::Kept);
    assert_eq!(marks(&kept.partial), b"\0ww\0\0\0");
    let (_, digest) = filler(&kept).unwrap();
    assert_eq!(marks(&kept.partial), b"\0DD\0\0\0");
    assert_eq!(std::fs::read(cache.copy_path(digest)).unwrap(), content());
    // Of one that is void nothing is copied, and nothing is read for that.
    let mut void = fetcher(&original);
    void.partial.make_void(Void::Lost(libc::EIO));
    void.original = File::options().write(true).open("/dev/null").unwrap();
    let why = filler(&void).unwrap_err();
    assert!(matches!(&why, Unfilled::Cache(why) if why == "Input/output error"), "{why:?}");
}

/// What readers ask for when nothing is filled any more is used as well.
#[test]
fn what_is_written_is_synced_as_long_as_somebody_may_read_it() {
    let (_scratch, cache, original) = cache_and_original();
    let identity = FileIdentity::of(&original).unwrap();
    let source = source(&original, std::path::Path::new("/shared/original"));
    let partial = begun(&cache, &original).reopen().unwrap();
    let fetcher = Fetcher::new(partial, original.try_clone().unwrap(), identity, &cache, &UNLIMITED);
    let filler = Filler {
        fetcher: &fetcher,
        cache: &cache,
        source: &source,
        limits: &UNLIMITED,
        pace: Pace::Background,
    };
    std::thread::scope(|scope| {
        scope.spawn(|| filler.sync_until_stopped(Duration::from_millis(5)));
        for chunk in [0, 4] {
            assert_eq!(fetcher.demand(chunk..chunk + 1), Fetched::Kept);
            let begin = std::time::Instant::now();
            while fetcher.partial.marks(chunk..chunk + 1).unwrap() != [DURABLE] {
                assert!(begin.elapsed() < Duration::from_secs(20));
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        fetcher.stop(Stopped::Changed);
    });
}
