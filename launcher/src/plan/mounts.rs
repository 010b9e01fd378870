//! Which mounts a container has.

use std::fs;
use std::path::{Component, Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::config::Compatible;
use mizzen_core::failure::cause;
use mizzen_core::fs_server;
use mizzen_core::options::{MountFlags, Tmpfs};
use mizzen_core::settings::{Hostname, Writable};

use super::mount_options::Asked;
use super::{Identity, identity, links, mount_changes, mount_points};
use crate::host::Host;
use crate::host_libraries::{self, HostLibraries};
use crate::image::{Entry, Tree, in_image, read_file, resolve};
use crate::mount::{Mount, MountKind, Shape};
use crate::options::RunOptions;
use crate::slurm;

/// A larger passwd or group file is not an account file.
const ACCOUNTS_LIMIT: usize = 4 << 20;
const HOSTS: &str = "/etc/hosts";
/// A file that apt reads.
const APT_SETTINGS: &str = "/etc/apt/apt.conf.d/99mizzen";
/// Root's home directory inside.
pub const ROOT_HOME: &str = "/root";
/// Directories that belong to the image: a current directory in one of them means the image's, not the host's.
const IMAGE_OWNED: [&str; 11] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/boot", "/proc", "/sys", "/dev"];

/// What other parts of the plan want to have mounted.
pub struct Others<'a> {
    /// Directories for MPI, with the reason.
    pub mpi: &'a [(PathBuf, &'static str)],
    /// What comes from the node.
    pub host_libraries: &'a HostLibraries,
    /// What options ask for.
    pub asked: Vec<Asked>,
}

/// All mounts, parents first; of two on the same place the later one.
pub fn decide(
    options: &RunOptions,
    tree: &dyn Tree,
    host: &Host,
    identity: &Identity,
    others: Others,
    notes: &mut Vec<String>,
) -> Result<Vec<Mount>, Failure> {
    let mut wanted = defaults(options, tree, host, identity)?;
    wanted.extend(of_host_libraries(others.host_libraries));
    if let Some(MountKind::Devices(devices)) = wanted.first_mut().map(|mount| &mut mount.kind) {
        devices.extend(others.host_libraries.devices.iter().cloned());
    }
    split_devices(&mut wanted);
    if options.unshare.ipc {
        mount_changes::own_shared_memory(&mut wanted);
    }
    let there = |directory: &Path, wanted: &[Mount]| {
        let same =
            |mount: &Mount| matches!(&mount.kind, MountKind::Bind { source, .. } if *source == mount.target);
        wanted.iter().any(|mount| same(mount) && directory.starts_with(&mount.target))
    };
    for (directory, why) in others.mpi {
        if there(directory, &wanted) {
            continue;
        }
        let kind = MountKind::Bind { source: directory.clone(), shape: Shape::Directory };
        let (target, flags, why) = (directory.clone(), MountFlags::default(), (*why).to_owned());
        wanted.push(Mount { kind, target, flags, origin: None, why });
    }
    wanted.extend(others.host_libraries.mounts.iter().cloned());
    for asked in others.asked {
        match asked {
            Asked::Mount(mount) => wanted.push(mount),
            Asked::Unmount { target, why } => mount_changes::leave_out(&mut wanted, &target, &why, notes)?,
            Asked::LeftOut(note) => notes.push(note),
        }
    }
    wanted.extend(empty_home(options, host, tree, &wanted));
    links::follow(&mut wanted, notes);
    mount_points::find(wanted, tree, notes)
}

/// Directories below /dev are mounts of their own, not device nodes: what is in them is the host's.
fn split_devices(wanted: &mut Vec<Mount>) {
    let Some(first) = wanted.first_mut() else { return };
    let (dev, why) = (first.target.clone(), first.why.clone());
    let MountKind::Devices(devices) = &mut first.kind else { return };
    let (directories, nodes) = devices.drain(..).partition::<Vec<PathBuf>, _>(|device| device.is_dir());
    *devices = nodes;
    wanted.extend(directories.into_iter().map(|source| Mount {
        target: dev.join(source.file_name().unwrap_or_default()),
        kind: MountKind::Bind { source, shape: Shape::Directory },
        flags: MountFlags::default(),
        origin: None,
        why: why.clone(),
    }));
}

/// What every container has, unless an option says otherwise.
fn defaults(
    options: &RunOptions,
    tree: &dyn Tree,
    host: &Host,
    identity: &Identity,
) -> Result<Vec<Mount>, Failure> {
    let default = |kind, target: &Path| Mount {
        kind,
        target: target.to_owned(),
        flags: MountFlags::default(),
        origin: None,
        why: "default".to_owned(),
    };
    let bind = |path: &Path, shape| default(MountKind::Bind { source: path.to_owned(), shape }, path);
    let read_only = MountFlags { read_only: true, ..MountFlags::default() };
    let proc = Path::new("/proc");
    let mut mounts = vec![
        default(MountKind::Devices(host.devices.clone()), Path::new("/dev")),
        if options.unshare.pid { default(MountKind::Proc, proc) } else { bind(proc, Shape::Directory) },
        bind(Path::new("/sys"), Shape::Directory),
        bind(Path::new("/tmp"), Shape::Directory),
    ];
    // As /tmp, unless that is where the changes of a writable root are kept, which no program should meet.
    let var_tmp = Path::new("/var/tmp");
    let changes_apart = options.settings.writable() == Writable::No || host.tmpfs_has_xattrs;
    if changes_apart && var_tmp.is_dir() && matches!(tree.entry(var_tmp), Ok(Some(Entry::Directory))) {
        mounts.push(bind(var_tmp, Shape::Directory));
    }
    for file in ["/etc/resolv.conf", "/etc/hosts"].map(Path::new) {
        if file.is_file() {
            mounts.push(Mount { flags: read_only, ..bind(file, Shape::File) });
        }
    }
    if let Some(hosts) = options.settings.hostname.as_ref().and_then(hosts_with) {
        let why = "default: the node's, with the container's host name added".to_owned();
        mounts.push(Mount { flags: read_only, why, ..default(MountKind::File(hosts), Path::new(HOSTS)) });
    }
    // Not through a link, as it usually is: the link's target is one of the image's time zones and must stay so.
    // The variable TZ tells the zone in that case.
    let localtime = Path::new("/etc/localtime");
    if localtime.is_file() && matches!(tree.entry(localtime), Ok(Some(Entry::File { .. }))) {
        let writable = options.settings.writable() != Writable::No;
        // In a writable root a file of its own: the package of the time zones gives a link that name, which a mount would refuse.
        mounts.push(match fs::read(localtime) {
            Ok(zone) if writable && zone.len() <= ACCOUNTS_LIMIT => default(MountKind::File(zone), localtime),
            _ => Mount { flags: read_only, ..bind(localtime, Shape::File) },
        });
    }
    type Complete = fn(&[u8], &Identity, &Host) -> Option<Vec<u8>>;
    let accounts: [(&str, Complete); 2] =
        [("/etc/passwd", identity::passwd_with_user), ("/etc/group", identity::group_with_users)];
    for (file, complete) in accounts {
        let file = Path::new(file);
        let image = read_file(tree, file, ACCOUNTS_LIMIT).map_err(|error| in_image(file, error))?;
        if let Some(content) = complete(&image.unwrap_or_default(), identity, host) {
            let why = "default: the image's, with the user added".to_owned();
            mounts.push(Mount { flags: read_only, why, ..default(MountKind::File(content), file) });
        }
    }
    // apt would fetch as a user of its own, and sees that it is not. In a read-only root nothing is installed.
    let apt = Path::new(APT_SETTINGS);
    let installs = options.settings.remap_root() && options.settings.writable() != Writable::No;
    if installs && matches!(tree.entry(apt.parent().unwrap_or(apt)), Ok(Some(Entry::Directory))) {
        let why = "default: apt works as root, who is the only user here".to_owned();
        let content = b"APT::Sandbox::User \"root\";\n".to_vec();
        mounts.push(Mount { flags: read_only, why, ..default(MountKind::File(content), apt) });
    }
    if options.step.as_ref().is_some_and(|step| step.commands.is_some()) {
        let launcher = std::env::current_exe().map_err(|error| {
            Failure::new(format!("cannot find the launcher's own file: {}", cause(&error)))
        })?;
        let why = "default: Slurm's commands".to_owned();
        let mount = default(MountKind::Commands(launcher), Path::new(slurm::DIRECTORY));
        mounts.push(Mount { flags: read_only, why, ..mount });
    }
    if let Some(script) = options.step.as_ref().and_then(|step| step.script.as_ref()) {
        let why = "default: the batch script".to_owned();
        mounts.push(Mount { flags: read_only, why, ..bind(script, Shape::File) });
    }
    let home = host.home.as_deref().filter(|home| options.settings.mount_home() && !image_owned(home));
    if let Some(home) = home {
        mounts.push(Mount { why: "default: the home directory".to_owned(), ..bind(home, Shape::Directory) });
        let root_home = Path::new(ROOT_HOME);
        if options.settings.remap_root() && home != root_home {
            let why = "default: the home directory, of root inside".to_owned();
            mounts.push(Mount { why, target: root_home.to_owned(), ..bind(home, Shape::Directory) });
        }
    }
    let temporary = host.environment.iter().find(|(name, _)| name == "TMPDIR");
    let temporary = temporary.map(|(_, value)| PathBuf::from(value));
    let temporary = temporary.filter(|path| path.is_absolute() && fs_server::is_directory(path));
    let temporary = temporary.filter(|_| changes_apart);
    let cwd = host.cwd.as_ref().filter(|_| options.compatible != Compatible::Pyxis);
    for (directory, why) in [(temporary.as_ref(), "default: TMPDIR"), (cwd, "default: the current directory")]
    {
        let Some(directory) = directory else { continue };
        let covered = mounts.iter().any(|other| directory.starts_with(&other.target));
        let near_home = |home: &Path| directory.starts_with(home) || home.starts_with(directory);
        let left_out = !options.settings.mount_home() && host.home.as_deref().is_some_and(near_home);
        // /var or /opt as a whole would hide the image's.
        let hides_image = directory.components().count() == 2 && matches!(tree.entry(directory), Ok(Some(_)));
        if !image_owned(directory) && !covered && !left_out && !hides_image {
            mounts.push(Mount { why: why.to_owned(), ..bind(directory, Shape::Directory) });
        }
    }
    Ok(mounts)
}

/// HOME is always a directory that programs can write to, if only an empty one.
fn empty_home(options: &RunOptions, host: &Host, tree: &dyn Tree, mounts: &[Mount]) -> Option<Mount> {
    let outside = || host.environment.iter().find(|(name, _)| name == "HOME").map(|(_, home)| home.into());
    let home: PathBuf = if options.settings.remap_root() { ROOT_HOME.into() } else { outside()? };
    let plain = home.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    let there = mounts.iter().any(|mount| home.starts_with(&mount.target))
        || resolve(tree, &home).is_ok_and(|found| found.entry.is_some());
    if !home.is_absolute() || !plain || image_owned(&home) || there {
        return None;
    }
    let why = "default: an empty home directory".to_owned();
    let (kind, flags) = (MountKind::Tmpfs(Tmpfs::default()), MountFlags::default());
    Some(Mount { kind, target: home, flags, origin: None, why })
}

/// The node's file of host names with another one, unless it is there already: programs look their own name up.
fn hosts_with(hostname: &Hostname) -> Option<Vec<u8>> {
    let mut hosts = fs::read(HOSTS).unwrap_or_default();
    let mut names = hosts.split(|byte| *byte == b'\n').flat_map(|line| {
        line.split(|byte| *byte == b'#').next().unwrap_or_default().split(u8::is_ascii_whitespace).skip(1)
    });
    if names.any(|name| name == hostname.as_str().as_bytes()) {
        return None;
    }
    if !hosts.is_empty() && !hosts.ends_with(b"\n") {
        hosts.push(b'\n');
    }
    hosts.extend(format!("127.0.1.1 {}\n", hostname.as_str()).bytes());
    Some(hosts)
}

/// The node's libraries and programs in their directory, and what has a place of its own.
fn of_host_libraries(given: &HostLibraries) -> Vec<Mount> {
    let read_only = MountFlags { read_only: true, ..MountFlags::default() };
    let mount = |kind, target: &Path, why: String| Mount {
        kind,
        target: target.to_owned(),
        flags: read_only,
        origin: None,
        why,
    };
    let mut mounts = Vec::new();
    if !given.files.is_empty() || !given.links.is_empty() {
        let links = given.links.iter().map(|(place, target)| (place.clone(), target.clone())).collect();
        let kind = MountKind::HostFiles { files: given.files.clone(), links };
        mounts.push(mount(kind, Path::new(host_libraries::DIRECTORY), "the node's libraries".to_owned()));
    }
    for (path, why) in &given.binds {
        let shape = if path.is_dir() { Shape::Directory } else { Shape::File };
        mounts.push(mount(MountKind::Bind { source: path.clone(), shape }, path, why.clone()));
    }
    mounts
}

/// Whether a path of the host means the image's inside.
pub fn image_owned(path: &Path) -> bool {
    path == Path::new("/") || IMAGE_OWNED.iter().any(|owned| path.starts_with(owned))
}

#[cfg(test)]
mod tests {
    use super::super::{Changes, Root, mount_changes, mount_options};
    use super::*;
    use crate::image::DirectoryTree;
    use crate::image::testing::Scratch;
    use crate::options::Origin;
    use mizzen_core::options::parse_mounts;
    use mizzen_core::settings::{Key, Settings};

    /// An image with the usual directories, and a host with a home and a current directory below it.
    fn image() -> (Scratch, DirectoryTree) {
        let scratch = Scratch::new();
        for directory in ["bin", "etc", "dev", "proc", "sys", "tmp", "opt/app", "mnt"] {
            scratch.directory(directory);
        }
        scratch.file("opt/file", "");
        scratch.link("link", "opt/app");
        let tree = DirectoryTree::open(scratch.path()).unwrap();
        (scratch, tree)
    }

    fn decided(options: &RunOptions, host: &Host, tree: &dyn Tree) -> Result<Vec<Mount>, Failure> {
        let identity = Identity::new(host, false);
        let asked = mount_options::asked_mounts(options, host)?;
        let others = Others { mpi: &[], host_libraries: &HostLibraries::default(), asked };
        decide(options, tree, host, &identity, others, &mut Vec::new())
    }

    fn with_mounts(texts: &[(&str, Origin)]) -> RunOptions {
        let mounts = texts.iter().flat_map(|(text, origin)| {
            parse_mounts(text.as_ref()).unwrap().into_iter().map(move |mount| (mount, *origin))
        });
        RunOptions { mounts: mounts.collect(), ..RunOptions::default() }
    }

    /// Where something is mounted, in order, without what every container has.
    fn targets(options: &RunOptions, host: &Host) -> Vec<String> {
        let (_scratch, tree) = image();
        let mounts = decided(options, host, &tree).unwrap();
        let usual = |mount: &&Mount| mount.origin.is_some() || mount.why.starts_with("default: ");
        mounts.iter().filter(usual).map(|mount| mount.target.display().to_string()).collect()
    }

    #[test]
    fn every_container_has_these() {
        let (_scratch, tree) = image();
        let mounts = decided(&RunOptions::default(), &Host::for_tests(), &tree).unwrap();
        let found: Vec<&Path> = mounts.iter().map(|mount| mount.target.as_path()).collect();
        for place in ["/dev", "/proc", "/sys", "/tmp", "/etc/passwd", "/etc/group"].map(Path::new) {
            assert!(found.contains(&place), "{place:?} {found:?}");
        }
        assert!(mounts.iter().all(|mount| mount.origin.is_none()));
    }

    #[test]
    fn settings_decide_what_of_the_host_is_there() {
        let home = Scratch::new();
        home.directory("work");
        let host = Host {
            home: Some(home.path().to_owned()),
            cwd: Some(home.path().join("work")),
            ..Host::for_tests()
        };
        let with = |settings: Settings| RunOptions { settings, ..RunOptions::default() };
        let own = |host: &Host, settings: Settings| {
            let (_scratch, tree) = image();
            let mounts = decided(&with(settings), host, &tree).unwrap();
            let below = |mount: &&Mount| mount.target.starts_with(home.path());
            mounts.iter().filter(below).map(|mount| mount.why.clone()).collect::<Vec<_>>()
        };
        // The current directory is in the home.
        assert_eq!(own(&host, Settings::default()), ["default: the home directory"]);
        // "home (or /root when remapped)"
        let remapped = with(Settings { remap_root: Some(true), ..Settings::default() });
        let (_image, tree) = image();
        let mounts = decided(&remapped, &host, &tree).unwrap();
        let root_home = mounts.iter().find(|mount| mount.target == Path::new(ROOT_HOME)).unwrap();
        assert_eq!(root_home.why, "default: the home directory, of root inside");
        let without = own(&host, Settings { mount_home: Some(false), ..Settings::default() });
        assert_eq!(without, Vec::<String>::new(), "neither the home nor what is below it");
    }

    #[test]
    fn mounts_of_users_and_sites_have_their_places() {
        let source = Scratch::new();
        source.directory("d/b");
        source.file("f", "");
        let (d, f) = (source.path().join("d"), source.path().join("f"));
        let (d, f) = (d.display(), f.display());
        let host = Host::for_tests();
        for (mounts, expected) in [
            (vec![(format!("{d}:/mnt/a"), Origin::Option)], vec!["/mnt/a"]),
            // Parents first, in whatever order they are given.
            (vec![(format!("{d}:/mnt/a/b,{d}:/mnt/a"), Origin::Option)], vec!["/mnt/a", "/mnt/a/b"]),
            // On the same place the user's holds, not the site's.
            (
                vec![(format!("{d}:/mnt"), Origin::Site), ("tmpfs:/mnt".to_owned(), Origin::Option)],
                vec!["/mnt"],
            ),
            // A link of the image is followed inside the image.
            (vec![(format!("{d}:/link"), Origin::Option)], vec!["/opt/app"]),
            (vec![(format!("{f}:/opt/file"), Origin::StepOption)], vec!["/opt/file"]),
        ] {
            let texts: Vec<(&str, Origin)> =
                mounts.iter().map(|(text, origin)| (text.as_str(), *origin)).collect();
            let found = targets(&with_mounts(&texts), &host);
            let found: Vec<&str> =
                found.iter().map(String::as_str).filter(|target| !target.starts_with("/etc/")).collect();
            assert_eq!(found, expected, "{mounts:?}");
        }
    }

    #[test]
    fn bad_mounts_name_who_wants_them() {
        let (_scratch, tree) = image();
        for (text, origin, message) in [
            ("/no/such:/mnt", Origin::Option, "--mount: source path does not exist: /no/such"),
            ("/no/such:/mnt", Origin::StepOption, "--container-mounts: source path does not exist: /no/such"),
            ("/no/such:/mnt", Origin::Site, "mizzen.toml: mounts: source path does not exist: /no/such"),
            (
                "/etc:/mnt:x-create=file",
                Origin::Option,
                "--mount: /etc: x-create=file, but it is a directory",
            ),
            ("umount:/proc", Origin::Option, "--mount: umount:/proc: /proc, /sys and /dev are mizzen's own"),
            ("/etc:/mnt:squashfs", Origin::Option, "--mount: /etc: not a file"),
        ] {
            let failure = decided(&with_mounts(&[(text, origin)]), &Host::for_tests(), &tree).unwrap_err();
            assert!(failure.message.starts_with(message), "{failure:?}");
            assert!(failure.hint.is_some(), "{failure:?}");
        }
    }

    #[test]
    fn what_is_unmounted_is_not_there_and_what_fails_may_be_left_out() {
        let (_scratch, tree) = image();
        let mut notes = Vec::new();
        let mut targets_of = |text: &str| {
            let options = with_mounts(&[(text, Origin::Option)]);
            let asked = mount_options::asked_mounts(&options, &Host::for_tests()).unwrap();
            let others = Others { mpi: &[], host_libraries: &HostLibraries::default(), asked };
            let identity = Identity::new(&Host::for_tests(), false);
            let mounts = decide(&options, &tree, &Host::for_tests(), &identity, others, &mut notes).unwrap();
            mounts.into_iter().map(|mount| mount.target).collect::<Vec<_>>()
        };
        let tmp = PathBuf::from("/tmp");
        assert!(targets_of("/etc:/mnt:ro").contains(&tmp));
        assert!(!targets_of("umount:/tmp").contains(&tmp));
        assert!(targets_of("umount:/tmp,tmpfs:/tmp").contains(&tmp), "in this order");
        assert!(!targets_of("/etc:/mnt,umount:/mnt").contains(&"/mnt".into()));
        assert!(!targets_of("/no/such:/mnt:nofail,umount:/opt").contains(&"/mnt".into()));
        assert_eq!(
            notes,
            [
                "--mount: source path does not exist: /no/such; it is left out (nofail)",
                "--mount: umount:/opt: nothing is mounted there"
            ]
        );
    }

    #[test]
    fn files_of_ours_are_in_a_writable_root_itself() {
        let (scratch, tree) = image();
        let mounts = decided(&RunOptions::default(), &Host::for_tests(), &tree).unwrap();
        let (all, count) = (mounts.clone(), mounts.len());
        assert_eq!(mount_changes::split_files(mounts.clone(), &Root::ReadOnly, &tree).1, []);
        let (kept, files) = mount_changes::split_files(
            mounts,
            &Root::Writable(Changes::InMemory { limit: "1m".to_owned() }),
            &tree,
        );
        let names: Vec<&Path> = files.iter().map(|(path, _)| path.as_path()).collect();
        assert_eq!(names, ["/etc/group", "/etc/passwd"].map(Path::new));
        // In that of a container that runs, they are there already, or mounted.
        scratch.file("etc/group", &files[0].1);
        let shared = Root::Shared { read_only: false };
        let (mounted, none) = mount_changes::split_files(all, &shared, &tree);
        let has = |place: &str| mounted.iter().any(|mount| mount.target == Path::new(place));
        assert_eq!((none.len(), has("/etc/group"), has("/etc/passwd")), (0, false, true));
        assert_eq!(kept.len(), count - 2);
        let covered =
            decided(&with_mounts(&[("/etc:/etc", Origin::Option)]), &Host::for_tests(), &tree).unwrap();
        assert_eq!(
            mount_changes::split_files(
                covered,
                &Root::Writable(Changes::InMemory { limit: "1m".to_owned() }),
                &tree
            )
            .1,
            []
        );
    }

    #[test]
    fn an_own_host_name_can_be_looked_up() {
        let (_scratch, tree) = image();
        let mut settings = Settings::default();
        settings.set(Key::Hostname, b"surely-not-there").unwrap();
        let mounts =
            decided(&RunOptions { settings, ..RunOptions::default() }, &Host::for_tests(), &tree).unwrap();
        let hosts = mounts.iter().find(|mount| mount.target == Path::new(HOSTS)).unwrap();
        let MountKind::File(content) = &hosts.kind else { panic!("{hosts:?}") };
        assert!(content.ends_with(b"\n127.0.1.1 surely-not-there\n"));
    }
}
