//! From what the user typed to the validated request, and its way to the node in one environment variable.
//!
//! The client makes a [`Request`] from the options; the node decodes it again and trusts nothing: the variable
//! is the user's to change.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::digest::{Digest, split_pin};
use crate::failure::{quote, quote_reference};
use crate::settings::Key;
use crate::{Config, Failure, Settings, image, pairs};

/// Carries the request from srun, sbatch and salloc to the node, and from a job to the srun calls in it. The
/// prefix SLURM_ lets it pass `--export=NONE`.
pub const VARIABLE: &str = "SLURM_MIZZEN_REQUEST";

/// Carries the request where sbatch drops its whole environment (`--export-file`): what a plugin gives sbatch under the
/// name [`SUBMITTED`] is put into the job's environment in spite of that. The node turns it into [`VARIABLE`].
pub const SUBMITTED_VARIABLE: &str = "SLURM_SPANK_MIZZEN_REQUEST";
/// Its name before Slurm puts `SLURM_SPANK_` in front.
pub const SUBMITTED: &str = "MIZZEN_REQUEST";

/// A longer request would take too much of what a job's environment may hold; on the node it would only take time.
pub const LIMIT: usize = 64 << 10;

/// The kernel's limit on a path.
const PATH_LIMIT: usize = 4095;
/// `--container=none`: no container, although the job has one.
const NONE: &[u8] = b"none";

/// What a step shall run in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The node itself: the user switched an inherited container off.
    Host,
    /// Slurm's own OCI runtime, whose business `--container` is where there is an oci.conf.
    SlurmRuntime,
    /// A container of its own.
    Container(Container),
    /// The container of another step of the same job on this node.
    Join(String),
}

/// A container, fully described: nothing in it depends on where it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Absolute path of the image.
    pub image: PathBuf,
    /// The only content that it may have.
    pub digest: Option<Digest>,
    /// Everything else that the user said.
    pub settings: Settings,
}

impl Request {
    /// Makes a request of the value of `--container` or `--container-image`; `option` is its name in messages.
    /// A relative path belongs to `directory`, where the job was submitted.
    pub fn from_option(
        option: &str,
        value: &[u8],
        directory: &Path,
        config: &Config,
    ) -> Result<Request, Failure> {
        if value == NONE {
            return Ok(Request::Host);
        }
        let (image, digest) =
            find_image(value, directory, config).map_err(|failure| failure.about(option))?;
        Ok(Request::Container(Container { image, digest, settings: Settings::default() }))
    }

    /// Makes a request of the value of `--container-join`: a step of this job, `0` or `batch`, also as `7.0`.
    pub fn from_join(value: &[u8]) -> Result<Request, Failure> {
        let text = std::str::from_utf8(value).unwrap_or_default();
        let number = |part: &str| part.parse::<u32>().is_ok();
        let (job, step) = text.split_once('.').map_or((None, text), |(job, step)| (Some(job), step));
        let named = ["batch", "interactive"].contains(&step);
        if job.is_none_or(number) && (named || number(step)) {
            return Ok(Request::Join(text.to_owned()));
        }
        Err(Failure::new(format!("\"{}\" is not a step", quote(value)))
            .hint("write the number of a step that runs on the node, as `squeue --steps` shows it, or batch"))
    }

    /// Makes a request of an option that reached the node without the client's request, so that nobody knows
    /// which directory a relative path belongs to. The settings are asked for only if there is a container to have them.
    pub fn from_bare_option(
        option: &str,
        value: &[u8],
        settings: impl FnOnce() -> Result<Settings, Failure>,
    ) -> Result<Request, Failure> {
        let not_absolute = |what: &[u8]| {
            Failure::new(format!("{} is not absolute", quote_reference(what)))
                .hint("mizzen was not active where the job was submitted; check plugstack.conf there")
        };
        check_path_text(value).map_err(|failure| failure.about(option))?;
        if value == NONE {
            return Ok(Request::Host);
        }
        let (image, digest) = split_pin(value);
        let image = PathBuf::from(OsStr::from_bytes(image));
        if !image.is_absolute() {
            return Err(not_absolute(value).about(option));
        }
        let settings = settings()?;
        if let Some((key, text)) = settings.relative() {
            return Err(not_absolute(&text).about(key.variable()));
        }
        Ok(Request::Container(Container { image, digest, settings }))
    }

    /// Text for [`VARIABLE`].
    pub fn encode(&self) -> String {
        match self {
            Request::Host => "none".to_owned(),
            Request::SlurmRuntime => "oci".to_owned(),
            Request::Join(step) => pairs::encode([("join", step.clone().into_bytes())]),
            Request::Container(Container { image, digest, settings }) => {
                let image = ("image", image.as_os_str().as_bytes().to_vec());
                let digest = digest.map(|digest| ("digest", digest.to_string().into_bytes()));
                let settings = Key::ALL.iter().filter_map(|key| Some((key.name(), settings.text(*key)?)));
                pairs::encode([image].into_iter().chain(digest).chain(settings))
            }
        }
    }

    /// Reads [`VARIABLE`] back, on the node or in a nested srun.
    pub fn decode(text: &[u8]) -> Result<Request, Failure> {
        let request = match text {
            long if long.len() > LIMIT => Err(Failure::new(format!("too long: {} bytes", long.len()))),
            NONE => Ok(Request::Host),
            b"oci" => Ok(Request::SlurmRuntime),
            _ => pairs::decode(text).and_then(|pairs| from_pairs(&pairs)),
        };
        request.map_err(|failure| {
            failure.about(VARIABLE).hint(
                "only mizzen sets this variable; unset it, and check that all nodes have the same mizzen",
            )
        })
    }
}

fn from_pairs(pairs: &[(String, Vec<u8>)]) -> Result<Request, Failure> {
    if let [(key, step)] = pairs
        && key == "join"
    {
        return Request::from_join(step);
    }
    let (mut image, mut digest) = (None, None);
    let mut settings = Settings::default();
    for (name, value) in pairs {
        match Key::ALL.iter().find(|key| key.name() == name) {
            Some(key) => settings.set(*key, value).map_err(|failure| failure.about(name))?,
            None if name == "image" => image = Some(value),
            None if name == "digest" => {
                let read = std::str::from_utf8(value).ok().and_then(Digest::parse);
                let bad = || Failure::new(format!("\"{}\" is not a digest", quote(value)));
                digest = Some(read.ok_or_else(bad)?);
            }
            None => return Err(Failure::new(format!("unknown field \"{name}\""))),
        }
    }
    // The client makes every path absolute, for it alone knows where they begin.
    if let Some((key, text)) = settings.relative() {
        let shown = quote_reference(&text);
        return Err(Failure::new(format!("\"{shown}\" is not absolute")).about(key.name()));
    }
    let image = image.ok_or_else(|| Failure::new("no image"))?;
    check_path_text(image)?;
    let image = PathBuf::from(OsStr::from_bytes(image));
    if !image.is_absolute() {
        let shown = quote_reference(image.as_os_str().as_bytes());
        return Err(Failure::new(format!("\"{shown}\" is not absolute")));
    }
    Ok(Request::Container(Container { image, digest, settings }))
}

/// Finds the image that a user names, and sees that it is one; beside its path, the content that the name asks for.
pub fn find_image(
    value: &[u8],
    directory: &Path,
    config: &Config,
) -> Result<(PathBuf, Option<Digest>), Failure> {
    find_image_by(value, directory, config, |candidate| match candidate.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        // What it is, is found out now rather than when the job starts.
        _ => image::open(candidate).map(|opened| Some(opened.form)),
    })
}

/// The same with another way to look what lies at a path; None if there is nothing.
pub fn find_image_by(
    value: &[u8],
    directory: &Path,
    config: &Config,
    look: impl Fn(&Path) -> Result<Option<image::ImageFormat>, Failure>,
) -> Result<(PathBuf, Option<Digest>), Failure> {
    check_path_text(value)?;
    if let Some(scheme) = scheme_of(value) {
        let message = format!("{}: cannot fetch images from {scheme}", quote_reference(value));
        return Err(Failure::new(message).hint("give the path of an image file or directory"));
    }
    let (name, digest) = split_pin(value);
    check_path_text(name)?;
    let (path, form) = look_for(Path::new(OsStr::from_bytes(name)), directory, config, look)?;
    if digest.is_some() && form == image::ImageFormat::Directory {
        return Err(Failure::new(format!("{}: a directory has no digest", quote(name)))
            .hint("name it without @sha256:, or pack it into a squashfs file"));
    }
    Ok((path, digest))
}

/// What no image name may be, whoever typed it.
fn check_path_text(value: &[u8]) -> Result<(), Failure> {
    if value.is_empty() {
        return Err(Failure::new("the image is empty")
            .hint("write --container=IMAGE; a shell variable in it may be unset"));
    }
    if value.len() > PATH_LIMIT {
        let (length, shown) = (value.len(), quote_reference(value));
        return Err(Failure::new(format!(
            "the image's name has {length} bytes, more than the {PATH_LIMIT} of a path: {shown}"
        )));
    }
    if value.iter().any(u8::is_ascii_control) {
        return Err(Failure::new(format!("control character in \"{}\"", quote_reference(value)))
            .hint("a newline at the end often comes from $(command) or a file edited elsewhere"));
    }
    Ok(())
}

/// The scheme of `scheme://…`, if the value has that form.
fn scheme_of(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?;
    let (scheme, _) = text.split_once("://")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "+.-".contains(c);
    (!scheme.is_empty() && scheme.chars().all(plain)).then(|| format!("{scheme}://"))
}

/// The image's absolute path, and its form: the user's own file first, then the site's folders.
fn look_for(
    name: &Path,
    directory: &Path,
    config: &Config,
    look: impl Fn(&Path) -> Result<Option<image::ImageFormat>, Failure>,
) -> Result<(PathBuf, image::ImageFormat), Failure> {
    let mut candidates = vec![directory.join(name)];
    let bare =
        name.components().count() == 1 && matches!(name.components().next(), Some(Component::Normal(_)));
    if bare {
        candidates.extend(config.image_folders.iter().map(|folder| folder.join(name)));
    }
    for candidate in &candidates {
        if let Some(form) = look(candidate)? {
            return Ok((candidate.clone(), form));
        }
    }
    let tried: Vec<String> = candidates.iter().map(|c| quote(c.as_os_str().as_bytes())).collect();
    let message = format!("no such image; tried {}", tried.join(", "));
    Err(Failure::new(message).hint(if name.as_os_str().as_bytes().windows(4).any(|part| part == b"@sha") {
        "IMAGE@sha256:HEX takes 64 hexadecimal digits"
    } else if name.is_absolute() {
        "it must exist on this node, and you must be able to see it"
    } else {
        "a relative path starts at the current directory"
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_option(value: &[u8]) -> Result<Request, Failure> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        Request::from_option("--container", value, directory, &Config::default())
    }

    fn container(image: &[u8]) -> Request {
        Request::Container(Container {
            image: PathBuf::from(OsStr::from_bytes(image)),
            digest: None,
            settings: Settings::default(),
        })
    }

    #[test]
    fn a_relative_image_is_found_from_the_submission_directory() {
        let expected = concat!(env!("CARGO_MANIFEST_DIR"), "/src/image");
        assert_eq!(from_option(b"src/image"), Ok(container(expected.as_bytes())));
        assert_eq!(from_option(b"none"), Ok(Request::Host));
    }

    #[test]
    fn a_bare_name_is_looked_up_in_the_sites_folders() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let config =
            Config { image_folders: vec!["/nonexistent".into(), folder.clone()], ..Config::default() };
        let found =
            |name: &str| Request::from_option("--container", name.as_bytes(), Path::new("/"), &config);
        assert_eq!(found("image"), Ok(container(folder.join("image").as_os_str().as_bytes())));
        let failure = found("nothing.sqsh").unwrap_err();
        assert!(failure.message.contains("tried /nothing.sqsh, /nonexistent/nothing.sqsh, "), "{failure}");
        assert!(
            found("./image").unwrap_err().message.ends_with("tried /./image"),
            "a path is not a bare name"
        );
    }

    #[test]
    fn bad_values_are_named() {
        let cases: [(&[u8], &str); 8] = [
            (b"", "--container: the image is empty"),
            (
                &[b'a'; 100_000],
                "--container: the image's name has 100000 bytes, more than the 4095 of a path: aaa",
            ),
            (b"tf\n.sqsh", "--container: control character in \"tf\\n.sqsh\""),
            (b"/dev/null", "--container: /dev/null: not an image (is a character device)"),
            (
                b"Cargo.toml",
                concat!(
                    "--container: ",
                    env!("CARGO_MANIFEST_DIR"),
                    "/Cargo.toml: not an image (starts with \"[pac\", looks like"
                ),
            ),
            (b"/nonexistent/x", "--container: no such image; tried /nonexistent/x"),
            (b"docker://a/b", "--container: docker://a/b: cannot fetch images from docker://"),
            (b"oras://me:secret@host/x", "--container: oras://…@host/x: cannot fetch images from oras://"),
        ];
        for (value, expected) in cases {
            let failure = from_option(value).unwrap_err();
            assert!(failure.message.starts_with(expected), "{failure}");
        }
    }

    #[test]
    fn every_request_survives_the_variable() {
        let mut settings = Settings::default();
        settings.set(Key::Mounts, b"/a b:/c&d:ro,/e=%").unwrap();
        settings.set(Key::Writable, b"no").unwrap();
        let all_bytes: Vec<u8> = b"/".iter().copied().chain(0x20..=0x7e).chain(0x80..=0xff).collect();
        for request in [
            Request::Host,
            Request::SlurmRuntime,
            container(b"/shared/tf.sqsh"),
            container(&all_bytes),
            container(b"/none"),
            Request::Join("7.batch".to_owned()),
            Request::Container(Container {
                image: "/a".into(),
                digest: Some(Digest::new([7; 32])),
                settings,
            }),
        ] {
            let text = request.encode();
            assert!(text.bytes().all(|b| b.is_ascii_graphic()), "{text}");
            assert_eq!(Request::decode(text.as_bytes()), Ok(request));
        }
    }

    #[test]
    fn a_forged_variable_is_refused() {
        let cases: [(&[u8], &str); 13] = [
            (b"", "unknown field \"\""),
            (b"image", "the image is empty"),
            (b"image=tf.sqsh", "\"tf.sqsh\" is not absolute"),
            (b"image=/a&image=/b", "\"image\" is there twice"),
            (b"image=/a&mount=/b", "unknown field \"mount\""),
            (b"image=/a&mounts=b:c", "mounts: \"b:c\": the destination is not absolute"),
            (b"mounts=/a", "no image"),
            (b"image=/a&digest=sha256:0", "\"sha256:0\" is not a digest"),
            (b"join=../0", "\"../0\" is not a step"),
            (b"join=0&image=/a", "unknown field \"join\""),
            (b"image=/a%0Ab", "control character"),
            (b"image=/a%4", "bad escape"),
            (b"\xff\xfe", "unknown field \"\\xff\\xfe\""),
        ];
        let long = [b"image=/".as_slice(), &[b'a'; LIMIT]].concat();
        let failure = Request::decode(&long).unwrap_err();
        assert!(failure.message.ends_with("too long: 65543 bytes"), "{failure}");
        for (text, expected) in cases {
            let failure = Request::decode(text).unwrap_err();
            assert!(failure.message.starts_with(VARIABLE) && failure.message.contains(expected), "{failure}");
        }
    }
}
