//! From what the user typed to the validated request, and its way to the node in one environment variable.
//!
//! The client makes a [`Request`] from the options; the node decodes it again and trusts nothing: the variable
//! is the user's to change.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::digest::{Digest, split_pin};
use crate::environment::names_environment_file;
use crate::failure::{quote, quote_reference};
use crate::find_image::ImageFinder;
use crate::settings::Key;
use crate::{Failure, Reference, Settings, pairs};

/// Carries the request from srun, sbatch and salloc to the node, and from a job to the srun calls in it. The
/// prefix SLURM_ lets it pass `--export=NONE`.
pub const VARIABLE: &str = "SLURM_MIZZEN_REQUEST";

/// Carries the request of a later component of a heterogeneous job from salloc to `srun --het-group`, where it is another than
/// the first component's; the group's number follows.
pub const GROUP_VARIABLE: &str = "SLURM_MIZZEN_REQUEST_HET_GROUP_";

/// In place of a request: this component asks for nothing, others do.
pub const UNASKED: &str = "unasked";

/// Carries the request where sbatch drops its whole environment (`--export-file`): what a plugin gives sbatch under the
/// name [`SUBMITTED`] is put into the job's environment in spite of that. The node turns it into [`VARIABLE`].
pub const SUBMITTED_VARIABLE: &str = "SLURM_SPANK_MIZZEN_REQUEST";
/// Its name before Slurm puts `SLURM_SPANK_` in front.
pub const SUBMITTED: &str = "MIZZEN_REQUEST";

/// Tells slurmctld's job_submit plugin, and the site's prologs, whether a job has a container: `yes` or `no`. Unlike what is in the
/// environment it is never inherited. `SLURM_SPANK_` stands before it there.
pub const WANTED: &str = "MIZZEN_CONTAINER";

/// A longer request would take too much of what a job's environment may hold; on the node it would only take time.
pub const LIMIT: usize = 64 << 10;

/// The kernel's limit on a path.
const PATH_LIMIT: usize = 4095;
/// `--container=none`: no container, although the job has one.
pub(crate) const NONE: &[u8] = b"none";

/// What a step shall run in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // a process has one or two
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
    /// The image.
    pub image: ImageSource,
    /// Everything else that the user said.
    pub settings: Settings,
}

/// Where the image of a container comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// A file or directory that the user has named.
    File {
        /// Its absolute path.
        path: PathBuf,
        /// The only content that it may have.
        digest: Option<Digest>,
    },
    /// A file in the user's store.
    Stored {
        /// Its absolute path.
        path: PathBuf,
        /// The image in a registry that it was made of, with the digest of its manifest.
        reference: Reference,
    },
    /// An image in a registry that the node is to import, with the digest of its manifest.
    Unfetched(Reference),
    /// Whatever the container of the given name was made from.
    Recorded,
}

impl Default for ImageSource {
    fn default() -> ImageSource {
        ImageSource::file(PathBuf::new())
    }
}

impl ImageSource {
    /// A file of any content.
    pub fn file(path: impl Into<PathBuf>) -> ImageSource {
        ImageSource::File { path: path.into(), digest: None }
    }

    /// The image in a registry that it is, if it is one.
    pub fn reference(&self) -> Option<&Reference> {
        match self {
            ImageSource::File { .. } | ImageSource::Recorded => None,
            ImageSource::Stored { reference, .. } | ImageSource::Unfetched(reference) => Some(reference),
        }
    }

    /// What tells it from other images: its path, or its name in a registry.
    pub fn name(&self) -> OsString {
        match self {
            ImageSource::File { path, .. } | ImageSource::Stored { path, .. } => path.clone().into(),
            ImageSource::Unfetched(reference) => reference.to_string().into(),
            ImageSource::Recorded => OsString::new(),
        }
    }

    /// The fields of the request that say it.
    pub(crate) fn encode(&self) -> Vec<(&'static str, Vec<u8>)> {
        let image = |path: &PathBuf| ("image", path.as_os_str().as_bytes().to_vec());
        let named = |reference: &Reference| ("reference", reference.text_with_user().into_bytes());
        match self {
            ImageSource::File { path, digest } => {
                let digest = digest.map(|digest| ("digest", digest.to_string().into_bytes()));
                [image(path)].into_iter().chain(digest).collect()
            }
            ImageSource::Stored { path, reference } => vec![image(path), named(reference)],
            ImageSource::Unfetched(reference) => vec![named(reference)],
            ImageSource::Recorded => Vec::new(),
        }
    }

    /// One line that [`ImageSource::from_text`] reads.
    pub fn to_text(&self) -> String {
        pairs::encode(self.encode())
    }

    /// Reads it back. The file that it is in is a user's to change.
    pub fn from_text(text: &[u8]) -> Result<ImageSource, Failure> {
        match pairs::decode(text).and_then(|pairs| from_pairs(&pairs))? {
            Request::Container(Container { image, settings }) if settings == Settings::default() => Ok(image),
            _ => Err(Failure::new("not an image")),
        }
    }

    /// Reads the fields of a request that anybody may have written.
    pub(crate) fn decode(
        image: Option<&[u8]>,
        digest: Option<&[u8]>,
        reference: Option<&[u8]>,
    ) -> Result<ImageSource, Failure> {
        let path = image.map(absolute_path).transpose()?;
        let digest = digest.map(|text| {
            let read = std::str::from_utf8(text).ok().and_then(Digest::parse);
            read.ok_or_else(|| Failure::new(format!("\"{}\" is not a digest", quote(text))))
        });
        match (path, digest.transpose()?, reference.map(pinned_reference).transpose()?) {
            (Some(path), digest, None) => Ok(ImageSource::File { path, digest }),
            (Some(path), None, Some(reference)) => Ok(ImageSource::Stored { path, reference }),
            (None, None, Some(reference)) => Ok(ImageSource::Unfetched(reference)),
            (None, _, None) => Err(Failure::new("no image")),
            (_, Some(_), Some(_)) => Err(Failure::new("a reference and the digest of a file")),
        }
    }
}

/// The client makes every path absolute, for it alone knows where they begin.
pub(crate) fn absolute_path(text: &[u8]) -> Result<PathBuf, Failure> {
    check_path_text(text)?;
    let path = PathBuf::from(OsStr::from_bytes(text));
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Failure::new(format!("\"{}\" is not absolute", quote_reference(text))))
}

/// The client pins every name: what a tag means may change while the job waits.
pub(crate) fn pinned_reference(text: &[u8]) -> Result<Reference, Failure> {
    check_path_text(text)?;
    let reference = Reference::parse(text)?;
    if reference.digest.is_some() {
        return Ok(reference);
    }
    Err(Failure::new(format!("\"{}\" has no digest", quote_reference(text))))
}

fn not_absolute(what: &[u8]) -> Failure {
    Failure::new(format!("{} is not absolute", quote_reference(what)))
        .hint("mizzen was not active where the job was submitted; check plugstack.conf there")
}

fn refuse_relative(settings: &Settings) -> Result<(), Failure> {
    settings.relative().map_or(Ok(()), |(key, text)| Err(not_absolute(&text).about(key.variable())))
}

impl Request {
    /// Makes a request of the value of `--container` or `--container-image`; `option` is its name in messages.
    pub fn from_option(option: &str, value: &[u8], finder: &mut ImageFinder) -> Result<Request, Failure> {
        if value == NONE {
            return Ok(Request::Host);
        }
        let image = finder.find(value).map_err(|failure| failure.about(option))?;
        Ok(Request::Container(Container { image, settings: Settings::default() }))
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

    /// A container by its name, which a variable of the job has, where no client has made a request.
    pub fn from_bare_name(settings: Settings) -> Result<Request, Failure> {
        refuse_relative(&settings)?;
        Ok(Request::Container(Container { image: ImageSource::Recorded, settings }))
    }

    /// Makes a request of an option that reached the node without the client's request, so that nobody knows
    /// which directory a relative path belongs to. The settings are asked for only if there is a container to have them.
    pub fn from_bare_option(
        option: &str,
        value: &[u8],
        settings: impl FnOnce() -> Result<Settings, Failure>,
    ) -> Result<Request, Failure> {
        check_path_text(value).map_err(|failure| failure.about(option))?;
        if value == NONE {
            return Ok(Request::Host);
        }
        if names_environment_file(value) {
            return Err(unread_environment(value).about(option));
        }
        let (path, digest) = split_pin(value);
        let path = PathBuf::from(OsStr::from_bytes(path));
        if !path.is_absolute() {
            return Err(not_absolute(value).about(option));
        }
        let settings = settings()?;
        refuse_relative(&settings)?;
        Ok(Request::Container(Container { image: ImageSource::File { path, digest }, settings }))
    }

    /// Text for [`VARIABLE`].
    pub fn encode(&self) -> String {
        match self {
            Request::Host => "none".to_owned(),
            Request::SlurmRuntime => "oci".to_owned(),
            Request::Join(step) => pairs::encode([("join", step.clone().into_bytes())]),
            Request::Container(Container { image, settings }) => {
                let settings = Key::ALL.iter().filter_map(|key| Some((key.name(), settings.text(*key)?)));
                pairs::encode(image.encode().into_iter().chain(settings))
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

/// An environment file that nobody has read where the job was submitted. A node reads none.
pub fn unread_environment(value: &[u8]) -> Failure {
    Failure::new(format!("{}: environment files are read where a job is submitted", quote(value)))
        .hint("mizzen was not active there; check plugstack.conf there")
}

fn from_pairs(pairs: &[(String, Vec<u8>)]) -> Result<Request, Failure> {
    if let [(key, step)] = pairs
        && key == "join"
    {
        return Request::from_join(step);
    }
    let (mut image, mut digest, mut reference) = (None, None, None);
    let mut settings = Settings::default();
    for (name, value) in pairs {
        let field = match Key::ALL.iter().find(|key| key.name() == name) {
            Some(key) => {
                settings.set(*key, value).map_err(|failure| failure.about(name))?;
                continue;
            }
            None if name == "image" => &mut image,
            None if name == "digest" => &mut digest,
            None if name == "reference" => &mut reference,
            None => return Err(Failure::new(format!("unknown field \"{name}\""))),
        };
        *field = Some(value.as_slice());
    }
    if let Some((key, text)) = settings.relative() {
        let shown = quote_reference(&text);
        return Err(Failure::new(format!("\"{shown}\" is not absolute")).about(key.name()));
    }
    let image = match (image, digest, reference) {
        (None, None, None) if settings.name.is_some() => ImageSource::Recorded,
        _ => ImageSource::decode(image, digest, reference)?,
    };
    Ok(Request::Container(Container { image, settings }))
}

/// What no image name may be, whoever typed it.
pub(crate) fn check_path_text(value: &[u8]) -> Result<(), Failure> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn container(path: &[u8]) -> Request {
        of_image(ImageSource::file(OsStr::from_bytes(path)))
    }

    fn of_image(image: ImageSource) -> Request {
        Request::Container(Container { image, settings: Settings::default() })
    }

    fn reference(text: &str) -> Reference {
        Reference::parse(text.as_bytes()).unwrap().pinned(Digest::new([7; 32]))
    }

    #[test]
    fn every_request_survives_the_variable() {
        let mut settings = Settings::default();
        settings.set(Key::Mounts, b"/a b:/c&d:ro,/e=%").unwrap();
        settings.set(Key::Writable, b"no").unwrap();
        let mut named = Settings::default();
        named.set(Key::Name, b"dev:exec").unwrap();
        let all_bytes: Vec<u8> = b"/".iter().copied().chain(0x20..=0x7e).chain(0x80..=0xff).collect();
        for request in [
            Request::Host,
            Request::SlurmRuntime,
            container(b"/shared/tf.sqsh"),
            container(&all_bytes),
            container(b"/none"),
            Request::Join("7.batch".to_owned()),
            Request::Container(Container {
                image: ImageSource::File { path: "/a".into(), digest: Some(Digest::new([7; 32])) },
                settings,
            }),
            of_image(ImageSource::Stored { path: "/a".into(), reference: reference("docker://ubuntu") }),
            Request::Container(Container { image: ImageSource::Recorded, settings: named.clone() }),
            Request::Container(Container { image: ImageSource::file("/a"), settings: named }),
            of_image(ImageSource::Unfetched(reference("oras://$oauthtoken@nvcr.io:443/a/b:c"))),
        ] {
            let text = request.encode();
            assert!(text.bytes().all(|b| b.is_ascii_graphic()), "{text}");
            assert_eq!(Request::decode(text.as_bytes()), Ok(request));
        }
    }

    #[test]
    fn a_forged_variable_is_refused() {
        let digest = Digest::new([7; 32]);
        let both = format!("image=/a&digest={digest}&reference=docker://b@{digest}");
        let cases: [(&[u8], &str); 22] = [
            (b"", "unknown field \"\""),
            (b"image", "the image is empty"),
            (b"image=tf.sqsh", "\"tf.sqsh\" is not absolute"),
            (b"image=/a&image=/b", "\"image\" is there twice"),
            (b"image=/a&mount=/b", "unknown field \"mount\""),
            (b"image=/a&mounts=b:c", "mounts: \"b:c\": the destination is not absolute"),
            (b"mounts=/a", "no image"),
            (b"name=a/b", "name: \"a/b\": the name has a /"),
            (b"name=x&digest=sha256:0", "\"sha256:0\" is not a digest"),
            (b"image=/a&digest=sha256:0", "\"sha256:0\" is not a digest"),
            (b"digest=sha256:0", "\"sha256:0\" is not a digest"),
            (b"reference=docker://a", "\"docker://a\" has no digest"),
            (b"reference=/a", "/a: \"/a\" is not the name of an image"),
            (b"reference=docker://u:secret@a", "docker://\u{2026}@a: a password in a name"),
            (b"image=a&reference=docker://b", "\"a\" is not absolute"),
            (b"reference=", "the image is empty"),
            (both.as_bytes(), "a reference and the digest of a file"),
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
