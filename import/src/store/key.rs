//! Which image a file of the store is, in its name: readable, and the same on every machine.
//!
//!     docker.io+library+ubuntu~24.04_linux-amd64_v1_5a6b….sqsh
//!     reference                      platform    writer  manifest's digest
//!
//! Run by: the user, in the importer.

use mizzen_core::reference::Transport;
use mizzen_core::{Digest, Reference};
use sha2::{Digest as _, Sha256};

/// The kernel's limit on a name.
const NAME_LIMIT: usize = 255;
/// What is put behind an image's name to make that of its sidecar.
pub const SIDECAR: &str = ".json";
/// Longer platforms and writers are shortened.
const PART_LIMIT: usize = 32;
/// Digits of a hash that stands for a long or strange text.
const HASH: usize = 12;
/// The suffixes of image files.
const SUFFIXES: [&str; 2] = ["sqsh", "sif"];

/// What makes an image another one than any other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImageKey {
    /// The name without digest, as `docker://docker.io/library/ubuntu:24.04`; for what is in no registry, its source.
    pub reference: String,
    /// The manifest's; where there is none, the content's.
    pub digest: Digest,
    /// `linux/amd64`.
    pub platform: String,
    /// The version of the writer, and its options where they are not the usual ones.
    pub writer: String,
    /// `sqsh` or `sif`.
    pub suffix: &'static str,
}

impl ImageKey {
    /// The image that a name in a registry means.
    pub fn new(reference: &Reference, digest: Digest, platform: &str, writer: &str) -> ImageKey {
        let bare = Reference { digest: None, ..reference.clone() };
        let suffix = match reference.transport {
            Transport::Docker => SUFFIXES[0],
            Transport::Oras => SUFFIXES[1],
        };
        ImageKey {
            reference: bare.to_string(),
            digest,
            platform: platform.to_owned(),
            writer: writer.to_owned(),
            suffix,
        }
    }

    /// The name of its file.
    pub fn file_name(&self) -> String {
        let rest = self.identity();
        let room = NAME_LIMIT - SIDECAR.len() - rest.len() - 1;
        format!("{}_{rest}", name_part(&self.reference, room))
    }

    /// What two references of the same image have in common: the end of the file's name.
    fn identity(&self) -> String {
        let [platform, writer] = [&self.platform, &self.writer].map(|text| short_part(text));
        format!("{platform}_{writer}_{}.{}", self.digest.hex(), self.suffix)
    }

    /// The name of its lease, the same for all references of the image.
    pub fn lease_name(&self) -> String {
        format!(".mizzen-lease-{}", self.identity())
    }

    /// Whether a file of this name has the same image in it, under whatever reference.
    pub fn is_same_image(&self, name: &str) -> bool {
        name.strip_suffix(&self.identity()).is_some_and(|front| front.len() > 1 && front.ends_with('_'))
    }
}

/// What the name of a file tells of its image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedImage {
    /// As far as it can be read back.
    pub reference: String,
    /// As far as it can be read back.
    pub platform: String,
    /// The manifest's.
    pub digest: Digest,
}

impl NamedImage {
    /// Reads a name that [`ImageKey::file_name`] has made; None for others.
    pub fn parse(name: &str) -> Option<NamedImage> {
        let (stem, suffix) = name.rsplit_once('.')?;
        let mut parts = stem.rsplitn(4, '_');
        let (hex, writer, platform, reference) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let good = SUFFIXES.contains(&suffix) && !writer.is_empty() && !reference.is_empty();
        let digest = Digest::parse(hex).filter(|digest| digest.hex() == hex)?;
        let scheme = if suffix == SUFFIXES[0] { "docker" } else { "oras" };
        good.then(|| NamedImage {
            reference: format!("{scheme}://{}", reference.replace('+', "/").replace('~', ":")),
            platform: platform.replace('-', "/"),
            digest,
        })
    }
}

/// A reference as a part of a file name. Where letters have to be replaced, or it is too long, a hash of the whole is in front,
/// and the end, which says most, behind it.
fn name_part(reference: &str, room: usize) -> String {
    let bare = reference.split_once("://").map_or(reference, |(_, bare)| bare);
    let replace = |c: char| match c {
        '/' => '+',
        ':' => '~',
        c if c.is_ascii_alphanumeric() || "._-".contains(c) => c,
        _ => '-',
    };
    let text: String = bare.chars().map(replace).collect();
    let is_exact = bare.chars().all(|c| c == '/' || c == ':' || c == replace(c));
    if is_exact && text.len() <= room && text.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return text;
    }
    // All letters are ASCII by now.
    let tail = &text[text.len().saturating_sub(room - HASH - 1)..];
    format!("{}+{}", hash(reference.as_bytes()), tail.trim_start_matches(['.', '-', '+', '~']))
}

/// A short text as a part of a file name; what cannot be one is hashed.
fn short_part(text: &str) -> String {
    let part = text.replace('/', "-");
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let good = !part.is_empty() && part.len() <= PART_LIMIT && part.chars().all(plain);
    if good { part } else { hash(text.as_bytes()) }
}

fn hash(bytes: &[u8]) -> String {
    let hash: [u8; 32] = Sha256::digest(bytes).into();
    Digest::new(hash).hex()[..HASH].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(reference: &str) -> ImageKey {
        ImageKey {
            reference: reference.to_owned(),
            digest: Digest::new([0xab; 32]),
            platform: "linux/amd64".to_owned(),
            writer: "v1".to_owned(),
            suffix: "sqsh",
        }
    }

    #[test]
    fn names_can_be_read() {
        let hex = "ab".repeat(32);
        for (reference, name) in [
            ("docker://docker.io/library/ubuntu:24.04", "docker.io+library+ubuntu~24.04"),
            ("docker://localhost:5000/a/b_c:d_e", "localhost~5000+a+b_c~d_e"),
            ("docker://host.io/a", "host.io+a"),
        ] {
            let whole = format!("{name}_linux-amd64_v1_{hex}.sqsh");
            assert_eq!(key(reference).file_name(), whole);
            let read = NamedImage::parse(&whole).unwrap();
            assert_eq!((read.reference.as_str(), read.platform.as_str()), (reference, "linux/amd64"));
            assert_eq!(read.digest, Digest::new([0xab; 32]));
            assert!(key("docker://other/name").is_same_image(&whole));
        }
        let reference = Reference::parse(format!("oras://ghcr.io/me/t:1@sha256:{hex}").as_bytes()).unwrap();
        let oras = ImageKey::new(&reference, Digest::new([0xab; 32]), "linux/arm/v7", "v1");
        assert_eq!(oras.file_name(), format!("ghcr.io+me+t~1_linux-arm-v7_v1_{hex}.sif"));
        assert_eq!(oras.reference, "oras://ghcr.io/me/t:1");
    }

    #[test]
    fn long_and_strange_references_have_short_names_of_their_own() {
        let long = format!("docker://host.io/{}:tag", "a/b".repeat(200));
        let longer = format!("docker://host.io/x/{}:tag", "a/b".repeat(200));
        let mut names = Vec::new();
        for reference in [
            &long,
            &longer,
            "docker://[::1]:5000/a",
            "docker://-::1-:5000/a",
            "oci-archive:/home/é x/a b.tar",
            "oci-archive:/home/é x/a+b.tar",
            "tar:/a+b",
            "tar:/a/b",
            "../../etc",
            ".hidden",
            "",
            "\n",
        ] {
            let name = key(reference).file_name();
            assert!(name.len() + SIDECAR.len() <= NAME_LIMIT, "{name}");
            assert!(name.starts_with(|c: char| c.is_ascii_alphanumeric()), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'), "{name}");
            assert_eq!(NamedImage::parse(&name).unwrap().digest, Digest::new([0xab; 32]), "{name}");
            assert!(name.ends_with(&format!("_v1_{}.sqsh", "ab".repeat(32))), "{name}");
            names.push(name);
        }
        assert!(names[0].contains("~tag_linux-amd64"), "the tag is to be seen: {}", names[0]);
        names.sort();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "{names:#?}");
    }

    #[test]
    fn another_digest_platform_or_writer_is_another_image() {
        let one = key("docker://host.io/a:b");
        let others = [
            ImageKey { digest: Digest::new([1; 32]), ..one.clone() },
            ImageKey { platform: "linux/arm64".to_owned(), ..one.clone() },
            ImageKey { platform: "a platform with a very long name/".repeat(9), ..one.clone() },
            ImageKey { writer: "v1.gzip9".to_owned(), ..one.clone() },
            ImageKey { suffix: "sif", ..one.clone() },
        ];
        for other in &others {
            assert_ne!(one.file_name(), other.file_name());
            assert_ne!(one.lease_name(), other.lease_name());
            assert!(!one.is_same_image(&other.file_name()));
            assert!(other.lease_name().len() < 200);
        }
        assert_eq!(one.lease_name(), key("docker://host.io/a:c").lease_name());
    }

    #[test]
    fn foreign_names_are_no_images_of_ours() {
        let hex = "ab".repeat(32);
        for name in [
            "",
            "tf.sqsh",
            "a_b_c_d.sqsh",
            &format!("a_linux-amd64_v1_{hex}.tar"),
            &format!("linux-amd64_v1_{hex}.sqsh"),
            &format!("_linux-amd64_v1_{hex}.sqsh"),
            &format!("a_linux-amd64_v1_{}.sqsh", &hex[1..]),
            &format!("a_linux-amd64_v1_{}.sqsh", hex.to_uppercase()),
            &format!("a_linux-amd64_v1_{hex}.sqsh.json"),
        ] {
            assert_eq!(NamedImage::parse(name), None, "{name}");
        }
    }
}
