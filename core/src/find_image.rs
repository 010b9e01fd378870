//! Finds the image that a user names: a file, a directory, or an image in a registry. What the name means, what the site allows
//! and what is wrong with it is decided here; who imports is the caller's business. Runs as the user, in srun, sbatch and salloc
//! and in the launcher.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::geteuid;

use crate::config::{Compatible, ImagePolicy, ImportWhen};
use crate::digest::split_pin;
use crate::failure::{quote, quote_reference};
use crate::fs_server::{self, FsServer, ServedPart, find_served};
use crate::image::{self, ImageFormat};
use crate::options::expected_of_a_shell;
use crate::reference::names_a_registry;
use crate::request::{ImageSource, check_path_text};
use crate::similar::similar_file;
use crate::trusted_file::reach_only_users;
use crate::{Config, Digest, Failure, Reference};

/// Who asks registries.
pub trait Importer {
    /// Finds out which manifest a name means now: the name with its digest.
    fn resolve(&mut self, reference: &Reference) -> Result<Reference, Failure>;

    /// Imports an image into the user's store, unless it is there: its file, and the name with the manifest's digest.
    fn import(&mut self, reference: &Reference) -> Result<(PathBuf, Reference), Failure>;

    /// The directory of the user's store.
    fn store(&self) -> Result<PathBuf, Failure>;
}

/// What a name means that is no path and has no scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BareNames {
    /// A file, here or in the site's folders.
    File,
    /// An image in a registry, as under pyxis.
    Registry,
}

impl BareNames {
    /// For the options of srun, sbatch and salloc.
    pub fn of_jobs(config: &Config) -> BareNames {
        match config.compatible {
            Compatible::Mizzen => BareNames::File,
            Compatible::Pyxis => BareNames::Registry,
        }
    }
}

/// Where images are looked for, and with whose help.
pub struct ImageFinder<'a> {
    /// Where relative paths begin.
    pub directory: &'a Path,
    /// The site's folders.
    pub config: &'a Config,
    /// The rules that hold for what the image is wanted for.
    pub policy: &'a ImagePolicy,
    /// What a name means that is no path and has no scheme.
    pub bare_names: BareNames,
    /// When images in registries are imported.
    pub import: ImportWhen,
    /// Who does that.
    pub importer: &'a mut dyn Importer,
}

/// What to do where images are not imported for jobs.
const BY_HAND: &str =
    "make a file of it with `mizzen import NAME -o FILE.sqsh` and name that, or use one of the site's images";

impl ImageFinder<'_> {
    /// Finds an image, sees that it is one, and that the site allows it.
    pub fn find(&mut self, value: &[u8]) -> Result<ImageSource, Failure> {
        check_path_text(value)?;
        // "PATH if it begins with `.` or `/`", else in a registry.
        let as_pyxis =
            self.bare_names == BareNames::Registry && !value.starts_with(b".") && !value.starts_with(b"/");
        if as_pyxis && scheme_of(value).is_none() {
            let whole = [b"docker://", value].concat();
            let reference = Reference::parse(&whole)?;
            return self.find_in_registry(&reference).map_err(|failure| name(&reference, failure));
        }
        if names_a_registry(value) {
            refuse_file_of_that_name(value, self.directory)?;
            let reference = Reference::parse(value)?;
            return self.find_in_registry(&reference).map_err(|failure| name(&reference, failure));
        }
        let (path, digest) =
            find_file(value, self.directory, self.config, |path, place| self.look_at(path, place))?;
        if let Some(digest) = digest {
            let shown = quote(path.as_os_str().as_bytes());
            self.policy.check_digest(digest).map_err(|failure| failure.about(shown))?;
        }
        Ok(ImageSource::File { path, digest })
    }

    /// An image in a registry. Whatever is against it is said before anything of it is fetched.
    fn find_in_registry(&mut self, reference: &Reference) -> Result<ImageSource, Failure> {
        if self.import == ImportWhen::Never {
            return Err(refused_by_key("never"));
        }
        let policy = self.policy;
        policy.check_reference(reference)?;
        if policy.restricts_files() {
            policy.check_store(&self.importer.store()?)?;
        }
        if self.import == ImportWhen::Node {
            let pinned = self.importer.resolve(reference)?;
            policy.check_manifest(&pinned)?;
            return Ok(ImageSource::Unfetched(pinned));
        }
        let reference = match (&policy.digests, reference.digest) {
            (Some(_), None) => self.importer.resolve(reference)?,
            _ => reference.clone(),
        };
        policy.check_manifest(&reference)?;
        let (path, reference) = self.importer.import(&reference)?;
        Ok(ImageSource::Stored { path, reference })
    }

    /// What lies at a path, if there is something. What it is, is found out now rather than when the job starts.
    fn look_at(&self, candidate: &Path, place: &Path) -> Result<Option<ImageFormat>, Failure> {
        match place.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            _ => {}
        }
        let opened = image::open_at(candidate, place)?;
        let shown = || quote(candidate.as_os_str().as_bytes());
        self.policy.check_file(&opened.file).map_err(|failure| failure.about(shown()))?;
        Ok(Some(opened.form))
    }
}

/// A name that is also that of a file could mean either, and anybody may put files into some directories. With a scheme it means
/// the registry.
fn refuse_file_of_that_name(value: &[u8], directory: &Path) -> Result<(), Failure> {
    if scheme_of(value).is_some() {
        return Ok(());
    }
    let (path, shown) = (directory.join(OsStr::from_bytes(value)), quote_reference(value));
    if let Some(part) = foreign_part(&path) {
        let path = quote(path.as_os_str().as_bytes());
        return Err(Failure::new(format!("{path} is not safe from other users: {}", part.describe()))
            .hint(format!("write ./{shown} for the file, docker://{shown} for the registry")));
    }
    if !fs_server::is_there(&path) {
        return Ok(());
    }
    Err(Failure::new(format!("{shown} is the name of a file here, and of an image in a registry"))
        .hint(format!("write ./{shown} for the file, docker://{shown} for the registry")))
}

/// Where a path leads to a file system that another user serves. Nothing has been asked of that, which may never answer.
fn foreign_part(path: &Path) -> Option<ServedPart> {
    find_served(path, FsServer::is_foreign).ok().flatten()
}

/// Finds a file or directory: its absolute path, and the content that the name asks for. `look` says what lies at a path, by another
/// one that leads to what has been found there; None if there is nothing.
pub fn find_file(
    value: &[u8],
    directory: &Path,
    config: &Config,
    look: impl Fn(&Path, &Path) -> Result<Option<ImageFormat>, Failure>,
) -> Result<(PathBuf, Option<Digest>), Failure> {
    check_path_text(value)?;
    if let Some(scheme) = scheme_of(value) {
        let message = format!("{}: cannot fetch images from {scheme}", quote_reference(value));
        if let Some(name) = value.strip_prefix(b"dockerd://") {
            let name = quote(name);
            return Err(Failure::new(message).hint(format!(
                "docker save {name} | mizzen import -o FILE -, where Docker is; then name FILE"
            )));
        }
        return Err(Failure::new(message).hint(
            "an image in a registry is written docker://NAME; others are the path of a file or directory",
        ));
    }
    let (name, digest) = split_pin(value);
    check_path_text(name)?;
    let (path, format) = look_for(Path::new(OsStr::from_bytes(name)), directory, config, look)?;
    if digest.is_some() && format == ImageFormat::Directory {
        return Err(Failure::new(format!("{}: a directory has no digest", quote(name)))
            .hint("name it without @sha256:, or pack it into a squashfs file"));
    }
    Ok((path, digest))
}

/// The absolute path, and what is there: the user's own file first, then the site's folders.
fn look_for(
    name: &Path,
    directory: &Path,
    config: &Config,
    look: impl Fn(&Path, &Path) -> Result<Option<ImageFormat>, Failure>,
) -> Result<(PathBuf, ImageFormat), Failure> {
    let mut candidates = vec![directory.join(name)];
    let bare =
        name.components().count() == 1 && matches!(name.components().next(), Some(Component::Normal(_)));
    if bare {
        candidates.extend(config.image_folders.iter().map(|folder| folder.join(name)));
    }
    for (index, candidate) in candidates.iter().enumerate() {
        let reached = match (bare, index) {
            (true, 0) => reach_bare(name, directory, &config.image_folders)?,
            (true, _) => reach_in(candidate, |part| fs_server::not_safe(candidate, part))?,
            // Who writes a path means what is there.
            (false, _) => None,
        };
        let place = match &reached {
            None if bare => continue,
            None => candidate.clone(),
            Some(reached) => fs_server::proc_path(reached),
        };
        if let Some(format) = look(candidate, &place)? {
            return Ok((candidate.clone(), format));
        }
    }
    let tried: Vec<String> = candidates.iter().map(|c| quote(resolved(c).as_os_str().as_bytes())).collect();
    let message = format!("no such image; tried {}", tried.join(", "));
    let meant = candidates.iter().find_map(|candidate| {
        let file = candidate.file_name()?.to_str()?;
        similar_file(candidate.parent()?, file).map(|similar| resolved(&candidate.with_file_name(similar)))
    });
    let hint = match meant {
        Some(meant) => format!("did you mean {}?", quote(meant.as_os_str().as_bytes())),
        None => hint_for_missing(name),
    };
    Err(Failure::new(message).hint(hint))
}

/// What has a bare name in the current directory, opened for looking at it. Anybody may put a file with the name of a site's image into
/// some directories. It is taken for what was meant only if nobody else can have made it. It is walked to once, and judged on the
/// way: between two looks others could put something else there.
fn reach_bare(name: &Path, directory: &Path, folders: &[PathBuf]) -> Result<Option<File>, Failure> {
    let own = directory.join(name);
    // Whoever serves a folder of the site's is the site's choice.
    let sites = folders.iter().find(|folder| fs_server::reach_name(folder, name).is_ok());
    let Some(sites) = sites.map(|folder| folder.join(name)) else {
        let [name, path] = [name, &own].map(|path| quote(path.as_os_str().as_bytes()));
        // Another user may have mounted a file system of their own on it.
        return reach_in(&own, |part| {
            Failure::new(format!("{path} is not safe from other users: {}", part.describe()))
                .hint(format!("write ./{name} if you mean it"))
        });
    };
    match reach_only_users(&own, geteuid().as_raw()) {
        Ok(Ok(reached)) => return Ok(Some(reached)),
        Ok(Err(_)) => {}
        // A link may lead to nothing yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound && fs_server::is_there(&own) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(image::cannot_open(&own, error)),
    }
    let [name, sites] = [name, &sites].map(|path| quote(path.as_os_str().as_bytes()));
    Err(Failure::new(format!("{name} is an image of the site's, and a file here that others can have made"))
        .hint(format!("write {sites} for the site's, ./{name} for the file")))
}

/// What has a name in a directory, opened for looking at it; None if nothing has. Who is in a file system that another user serves
/// means it, but not one that is mounted on a name there.
fn reach_in(path: &Path, not_safe: impl Fn(&ServedPart) -> Failure) -> Result<Option<File>, Failure> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
    let look = fs_server::look_from(directory, Path::new(name));
    if let Some(part) = &look.served {
        return Err(not_safe(part));
    }
    match look.end {
        Ok(reached) => Ok(Some(reached)),
        Err(Errno::ENOENT) if !fs_server::is_there(path) => Ok(None),
        Err(errno) => Err(image::cannot_open(path, errno.into())),
    }
}

/// A path without `.` and `..`, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let real = path.parent().zip(path.file_name()).and_then(|(parent, name)| {
        let has_dots = path.components().any(|part| part == Component::ParentDir);
        has_dots.then(|| parent.canonicalize().ok().map(|parent| parent.join(name))).flatten()
    });
    // Components leave `.` away.
    real.unwrap_or_else(|| path.components().collect())
}

/// Why a request for an image in a registry is not granted, by the key of mizzen.toml. Also on the node.
pub fn refused_by_key(value: &str) -> Failure {
    let what = match value {
        "never" => "images in registries are not imported for jobs",
        _ => "nodes do not import images",
    };
    let failure = Failure::new(format!("{what} here (mizzen.toml: import = \"{value}\")"));
    match value {
        "never" => failure.hint(BY_HAND),
        _ => failure.hint("mizzen.toml must be the same on login and compute nodes; submit the job again"),
    }
}

/// Says which image a failure is about, unless it says so itself.
fn name(reference: &Reference, failure: Failure) -> Failure {
    let text = reference.to_string();
    if failure.message.contains(text.split("@sha256:").next().unwrap_or(&text)) {
        failure
    } else {
        failure.about(text)
    }
}

/// What to do about a name that is no file's.
fn hint_for_missing(name: &Path) -> String {
    let text = name.as_os_str().as_bytes();
    if text.windows(4).any(|part| part == b"@sha") {
        return "IMAGE@sha256:HEX takes 64 hexadecimal digits".to_owned();
    }
    if let Some(word) = expected_of_a_shell(text) {
        return format!("{word} is not expanded here, as a shell would do; write the whole path");
    }
    if let Some(word) = [b"%u", b"%j"].into_iter().find(|word| text.windows(2).any(|part| part == *word)) {
        let word = quote(word);
        return format!(
            "{word} is expanded in mounts; an image is looked for before there is a job: write the whole path"
        );
    }
    if name.is_absolute() {
        return "it must exist on this node, and you must be able to see it".to_owned();
    }
    // `ubuntu:22.04` and the like are what Docker would take.
    let whole = [b"docker://", text].concat();
    let suggestion = Reference::parse(&whole).ok().filter(|_| !is_file_name(name)).map(|_| quote(&whole));
    let suggestion = suggestion.unwrap_or_else(|| "docker://NAME".to_owned());
    format!("a relative path starts at the current directory; an image in a registry is written {suggestion}")
}

/// Whether a name looks like that of an image file, or of an archive.
pub fn is_file_name(name: &Path) -> bool {
    name.extension().is_some_and(|extension| {
        ["sqsh", "sqfs", "squashfs", "sif", "simg", "img", "tar"].iter().any(|known| extension == *known)
    })
}

/// The scheme of `scheme://…`, if the value has that form.
fn scheme_of(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?;
    let (scheme, _) = text.split_once("://")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "+.-".contains(c);
    (!scheme.is_empty() && scheme.chars().all(plain)).then(|| format!("{scheme}://"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::Request;

    /// An importer that notes what it was asked.
    #[derive(Default)]
    struct Noting(Vec<String>);

    fn pinned(reference: &Reference) -> Reference {
        reference.pinned(Digest::new([7; 32]))
    }

    impl Importer for Noting {
        fn resolve(&mut self, reference: &Reference) -> Result<Reference, Failure> {
            self.0.push(format!("resolve {reference}"));
            Ok(pinned(reference))
        }

        fn import(&mut self, reference: &Reference) -> Result<(PathBuf, Reference), Failure> {
            self.0.push(format!("import {reference}"));
            if reference.repository == "library/missing" {
                return Err(Failure::new("no such image in docker.io"));
            }
            Ok(("/store/image.sqsh".into(), pinned(reference)))
        }

        fn store(&self) -> Result<PathBuf, Failure> {
            Ok("/store".into())
        }
    }

    fn find(value: &[u8], directory: &str, config: &Config) -> (Result<ImageSource, Failure>, Vec<String>) {
        let mut importer = Noting::default();
        let directory = Path::new(directory);
        let mut finder = ImageFinder {
            directory,
            config,
            policy: &config.policy,
            bare_names: BareNames::of_jobs(config),
            import: config.import,
            importer: &mut importer,
        };
        let found = finder.find(value);
        (found, importer.0)
    }

    fn here(value: &[u8]) -> Result<ImageSource, Failure> {
        find(value, env!("CARGO_MANIFEST_DIR"), &Config::default()).0
    }

    #[test]
    fn a_relative_image_is_found_from_the_submission_directory() {
        let found = find(b"./usr", "/", &Config::default()).0;
        assert_eq!(found, Ok(ImageSource::file("/./usr")));
    }

    #[test]
    fn a_bare_name_is_looked_up_in_the_sites_folders() {
        let config = Config { image_folders: vec!["/nonexistent".into(), "/".into()], ..Config::default() };
        let found = |name: &str| find(name.as_bytes(), "/dev", &config).0;
        assert_eq!(found("usr"), Ok(ImageSource::file("/usr")));
        let failure = found("nothing.sqsh").unwrap_err();
        assert!(
            failure.message.ends_with("tried /dev/nothing.sqsh, /nonexistent/nothing.sqsh, /nothing.sqsh"),
            "{failure}"
        );
        assert!(found("./usr").unwrap_err().message.ends_with("tried /dev/usr"), "a path is not a bare name");
    }

    /// It comes and goes while the name is looked for.
    #[test]
    fn what_others_put_beside_the_name_of_a_sites_image_is_never_taken() {
        let top = std::env::temp_dir().join(format!("mizzen-planted-{}", std::process::id()));
        let (here, site) = (top.join("here"), top.join("site"));
        [&top, &here, &site].into_iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let [planted, name] = ["planted", "tf.sqsh"].map(|name| here.join(name));
        [&planted, &site.join("tf.sqsh")].into_iter().for_each(|path| std::fs::write(path, "").unwrap());
        // What everybody can write is nobody's own.
        std::fs::set_permissions(&planted, PermissionsExt::from_mode(0o666)).unwrap();
        let config = Config { image_folders: vec![site.clone()], ..Config::default() };
        let stop = AtomicBool::new(false);
        let (mut outcomes, mut others) = ([0, 0], Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::fs::rename(&planted, &name).unwrap();
                    std::fs::rename(&name, &planted).unwrap();
                }
            });
            let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
            let refused = "tf.sqsh is an image of the site's, and a file here that others can have made";
            while outcomes.iter().any(|count| *count < 1000)
                && others.is_empty()
                && std::time::Instant::now() < end
            {
                let look = |_: &Path, place: &Path| Ok(place.exists().then_some(ImageFormat::Squashfs));
                match find_file(b"tf.sqsh", &here, &config, look) {
                    Ok((path, _)) if path == site.join("tf.sqsh") => outcomes[0] += 1,
                    Err(failure) if failure.message == refused => outcomes[1] += 1,
                    other => others.push(other),
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(others.is_empty(), "{others:?}");
        assert!(!outcomes.contains(&0), "{outcomes:?}");
        std::fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn a_name_that_is_no_file_may_be_in_a_registry() {
        for (name, suggestion) in [
            ("ubuntu", "docker://ubuntu"),
            ("ubuntu:22.04", "docker://ubuntu:22.04"),
            ("nvcr.io/nvidia/pytorch:24.01-py3", "docker://nvcr.io/nvidia/pytorch:24.01-py3"),
            ("tf.sqsh", "docker://NAME"),
            ("My Image", "docker://NAME"),
            ("./ubuntu", "docker://NAME"),
        ] {
            let failure = here(name.as_bytes()).unwrap_err();
            assert!(failure.message.starts_with("no such image; tried /"), "{failure}");
            let hint = "a relative path starts at the current directory; an image in a registry is written ";
            assert_eq!(failure.hint.unwrap(), format!("{hint}{suggestion}"));
        }
    }

    #[test]
    fn what_is_not_expanded_is_named() {
        for (name, hint) in [
            ("~/a.sqsh", "~ is not expanded here, as a shell would do; write the whole path"),
            ("$HOME/a.sqsh", "$HOME is not expanded here, as a shell would do; write the whole path"),
            (
                "/scratch/%u/a.sqsh",
                "%u is expanded in mounts; an image is looked for before there is a job: write the whole path",
            ),
            (
                "a-%j.sqsh",
                "%j is expanded in mounts; an image is looked for before there is a job: write the whole path",
            ),
        ] {
            assert_eq!(here(name.as_bytes()).unwrap_err().hint.as_deref(), Some(hint), "{name}");
        }
    }

    #[test]
    fn bad_values_are_named() {
        let directory = env!("CARGO_MANIFEST_DIR");
        let text = format!("{directory}/Cargo.toml: not an image (starts with \"[pac\", looks like");
        let cases: [(&[u8], &str); 9] = [
            (b"", "the image is empty"),
            (&[b'a'; 100_000], "the image's name has 100000 bytes, more than the 4095 of a path: aaa"),
            (b"tf\n.sqsh", "control character in \"tf\\n.sqsh\""),
            (b"/dev/null", "/dev/null: not an image (is a character device)"),
            (b"Cargo.toml", &text),
            (b"/nonexistent/x", "no such image; tried /nonexistent/x"),
            (b"https://a/b", "https://a/b: cannot fetch images from https://"),
            (b"oras://me:secret@host/x", "oras://…@host/x: a password in a name"),
            (b"docker://A", "docker://A: \"A\" is not the name of an image"),
        ];
        for (value, expected) in cases {
            let failure = here(value).unwrap_err();
            assert!(failure.message.starts_with(expected), "{failure}");
        }
    }

    #[test]
    fn images_in_registries_are_imported_where_the_site_says() {
        let reference = Reference::parse(b"docker://ubuntu").unwrap();
        let when = |import| Config { import, ..Config::default() };
        let stored = ImageSource::Stored { path: "/store/image.sqsh".into(), reference: pinned(&reference) };
        let (found, asked) = find(b"docker://ubuntu", "/", &when(ImportWhen::Submit));
        assert_eq!((found, asked), (Ok(stored), vec![format!("import {reference}")]));
        let (found, asked) = find(b"docker://ubuntu", "/", &when(ImportWhen::Node));
        assert_eq!(found, Ok(ImageSource::Unfetched(pinned(&reference))));
        assert_eq!(asked, [format!("resolve {reference}")]);
        let (found, asked) = find(b"nvcr.io#nvidia/x:1", "/", &when(ImportWhen::Never));
        let failure = found.unwrap_err();
        assert_eq!(
            failure.message,
            "docker://nvcr.io/nvidia/x:1: images in registries are not imported for jobs here \
             (mizzen.toml: import = \"never\")"
        );
        assert!(failure.hint.unwrap().contains("mizzen import") && asked.is_empty());
        let failed = find(b"docker://missing", "/", &Config::default()).0.unwrap_err();
        assert_eq!(failed.message, "docker://docker.io/library/missing:latest: no such image in docker.io");
    }

    #[test]
    fn under_pyxis_a_bare_name_is_in_a_registry() {
        let config = Config { compatible: Compatible::Pyxis, ..Config::default() };
        let here = env!("CARGO_MANIFEST_DIR");
        for (name, asked) in [
            ("ubuntu:24.04", "import docker://docker.io/library/ubuntu:24.04"),
            ("nvcr.io#nvidia/pytorch:1", "import docker://nvcr.io/nvidia/pytorch:1"),
            ("docker://ubuntu:24.04", "import docker://docker.io/library/ubuntu:24.04"),
            // Whatever files there are.
            ("src", "import docker://docker.io/library/src:latest"),
        ] {
            assert_eq!(find(name.as_bytes(), here, &config).1, [asked], "{name}");
        }
        let (found, asked) = find(b"./usr", "/", &config);
        assert_eq!((found, asked), (Ok(ImageSource::file("/./usr")), Vec::new()));
        let absolute = find(b"/usr", "/", &config);
        assert_eq!(absolute, (Ok(ImageSource::file("/usr")), Vec::new()));
    }

    #[test]
    fn a_path_is_a_file_and_a_scheme_never() {
        let directory = std::env::temp_dir().join(format!("mizzen-find-{}", std::process::id()));
        std::fs::create_dir_all(directory.join("nvcr.io#nvidia/bin")).unwrap();
        let text = directory.to_str().unwrap();
        std::fs::create_dir_all(directory.join("docker:/ubuntu/bin")).unwrap();
        let (found, asked) = find(b"nvcr.io#nvidia", text, &Config::default());
        let failure = found.unwrap_err();
        assert_eq!(
            failure.message,
            "nvcr.io#nvidia is the name of a file here, and of an image in a registry"
        );
        assert!(failure.hint.unwrap().starts_with("write ./nvcr.io#nvidia for the file") && asked.is_empty());
        let absolute = directory.join("nvcr.io#nvidia");
        let (found, asked) = find(absolute.as_os_str().as_bytes(), "/", &Config::default());
        assert_eq!((found, asked), (Ok(ImageSource::file(absolute)), Vec::new()));
        let (found, _) = find(b"docker://ubuntu", text, &Config::default());
        assert!(matches!(found, Ok(ImageSource::Stored { .. })), "{found:?}");
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn the_policy_is_asked_before_anything_is_fetched() {
        let policy = ImagePolicy { digests: Some(vec![Digest::new([8; 32])]), ..ImagePolicy::default() };
        let config = Config { policy, ..Config::default() };
        let (found, asked) = find(b"docker://ubuntu", "/", &config);
        let reference = Reference::parse(b"docker://ubuntu").unwrap();
        let expected =
            format!("{}: digests of this site's policy do not include {}", reference, Digest::new([7; 32]));
        assert_eq!((found.unwrap_err().message, asked), (expected, vec![format!("resolve {reference}")]));
        let policy = ImagePolicy { folders: Some(vec!["/sw".into()]), ..ImagePolicy::default() };
        let config = Config { policy, ..Config::default() };
        let (found, asked) = find(b"docker://ubuntu", "/", &config);
        let message =
            format!("{reference}: folders of this site's policy do not include the image store, /store");
        assert_eq!((found.unwrap_err().message, asked), (message, Vec::new()));
    }

    #[test]
    fn none_is_no_image() {
        let (directory, config) = (Path::new("/"), Config::default());
        let mut importer = Noting::default();
        let mut finder = ImageFinder {
            directory,
            config: &config,
            policy: &config.policy,
            bare_names: BareNames::of_jobs(&config),
            import: config.import,
            importer: &mut importer,
        };
        assert_eq!(Request::from_option("--container", b"none", &mut finder), Ok(Request::Host));
        let failure = Request::from_option("--container", b"docker://A", &mut finder).unwrap_err();
        assert!(failure.message.starts_with("--container: docker://A: "), "{failure}");
    }
}
