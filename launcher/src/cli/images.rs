//! The part of the command line that `mizzen-import` carries out: import, export, images, login, logout. The launcher only
//! checks the words and starts it, so that help, man pages and completions are one.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use mizzen_core::failure::quote;

pub(super) const IMPORT_EXAMPLES: &str = "\
Sources:
  docker://[USER@]REGISTRY/NAME[:TAG][@DIGEST]   a registry; docker://NAME is Docker Hub
  REGISTRY#NAME[:TAG]                            the same, as enroot and pyxis write it
  oras://REGISTRY/NAME[:TAG]                     a SIF or squashfs file kept in a registry
  oci:DIR[:NAME], oci-archive:FILE[:NAME]        an OCI layout, and one in a tar file
  docker-archive:FILE[:NAME]                     what `docker save` or `podman save` writes
  tar:FILE                                       a root file system in a tar file
  DIR, FILE                                      recognised by the content
  -                                              any of the archives, from standard input

Examples:
  mizzen import docker://ubuntu:24.04                        into your image store; prints the path
  mizzen import -o tf.sqsh docker://tensorflow/tensorflow    into a file
  mizzen import nvcr.io#nvidia/pytorch:24.01-py3             after `mizzen login nvcr.io`
  ssh laptop docker save mine | mizzen import -o mine.sqsh -
  srun --container=docker://ubuntu:24.04 cat /etc/os-release  imports it first, if it is not in the store";

pub(super) const EXPORT_EXAMPLES: &str = "\
Examples:
  mizzen export --format docker-archive --tag mine:1 mine.sqsh | docker load
  mizzen export --format oci-archive -o mine.tar mine.sqsh
  mizzen export tf.sqsh | tar -t";

pub(super) const IMAGES_EXAMPLES: &str = "\
Examples:
  mizzen images                               what there is
  mizzen images update                        import again what has changed in its registry
  mizzen images remove docker://ubuntu:24.04  by reference, digest or file name
  mizzen images prune --older-than 90d        what was not used for so long";

pub(super) const LOGIN_EXAMPLES: &str = "\
Examples:
  mizzen login nvcr.io -u '$oauthtoken'      asks for the API key of NVIDIA's registry
  mizzen login docker.io -u me --password-stdin < token";

/// What is imported, how, and where to.
#[derive(Clone, Debug, Args)]
pub struct ImportArgs {
    /// The file to write; without it an image of a registry goes to your image store
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The image for another machine than this one: OS/ARCH[/VARIANT], as linux/arm64
    #[arg(long, value_name = "OS/ARCH")]
    pub platform: Option<String>,
    /// How the image is written.
    #[command(flatten)]
    pub writing: WritingArgs,
    /// Threads that read and compress; by default as many as the process has CPUs. The image does not depend on it
    #[arg(short, long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Keep the owners of files; without it all belong to root, so that everybody's import is the same
    #[arg(long)]
    pub keep_owners: bool,
    /// Neither use nor fill the cache of layers
    #[arg(long)]
    pub no_cache: bool,
    /// Replace the file that is there, and import again what the store has
    #[arg(short, long)]
    pub force: bool,
    /// Who the user is at the registry.
    #[command(flatten)]
    pub account: AccountArgs,
    /// Fetch layers that the registry does not have from the addresses that it names, without credentials
    #[arg(long)]
    pub foreign_layers: bool,
    /// Show no progress
    #[arg(short, long)]
    pub quiet: bool,
    /// Print what was imported as JSON: path, reference, digest, platform, size
    #[arg(long)]
    pub json: bool,
    /// For the plugin: progress on standard error, and the answer, or the failure, in the form that it reads.
    #[arg(long, hide = true)]
    pub for_slurm: bool,
    /// Beside that: only find out which manifest the name means.
    #[arg(long, hide = true, requires = "for_slurm")]
    pub resolve_only: bool,
    /// The configuration that plugstack.conf names.
    #[arg(long, hide = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// For `--container-save`: the source is a directory, and the file is called so in messages.
    #[arg(long, hide = true, value_name = "PATH", requires = "output")]
    pub save_as: Option<PathBuf>,
    /// What to import, see below
    pub source: OsString,
}

/// How the squashfs is written.
#[derive(Clone, Debug, Args)]
pub struct WritingArgs {
    /// How the image is compressed
    #[arg(long, value_enum, value_name = "NAME", default_value_t = Compressor::Zstd)]
    pub compressor: Compressor,
    /// How hard it is compressed: zstd 1 to 19 (3 if not given), gzip 1 to 12 (9 if not given)
    #[arg(long, value_name = "N")]
    pub level: Option<u32>,
    /// Bytes that are compressed together: a power of two from 4k to 1m
    #[arg(long, value_name = "SIZE", default_value = "128k", value_parser = block_size)]
    pub block_size: u32,
}

/// The compressors of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compressor {
    /// The default: the fastest to read for its size.
    Zstd,
    /// For kernels that know no other.
    Gzip,
    /// The smallest, and slow.
    Xz,
    /// The fastest, and large.
    Lz4,
    /// No compression.
    None,
}

/// Who the user is at a registry. A password is never a word of a command line, which others can read.
#[derive(Clone, Debug, Default, Args)]
pub struct AccountArgs {
    /// Credentials of registries, in place of ~/.docker/config.json and the other usual files
    #[arg(long, value_name = "FILE")]
    pub authfile: Option<PathBuf>,
    /// Your name at the registry, with --password-stdin
    #[arg(short, long, requires = "password_stdin", value_name = "USER")]
    pub username: Option<String>,
    /// Read the password or token from standard input
    #[arg(long, requires = "username")]
    pub password_stdin: bool,
}

/// What is exported, and to what.
#[derive(Clone, Debug, Args)]
pub struct ExportArgs {
    /// The file to write; without it, or with `-`, standard output, which must not be a terminal
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// What is written
    #[arg(long, value_enum, value_name = "NAME", default_value_t = ExportFormat::Tar)]
    pub format: ExportFormat,
    /// How it is compressed; by default as all who read that format know it: gzip for OCI archives, else not at all
    #[arg(long, value_enum, value_name = "NAME")]
    pub compression: Option<ExportCompression>,
    /// The name of the image in the archive: NAME:TAG
    #[arg(long, value_name = "NAME:TAG")]
    pub tag: Option<String>,
    /// Replace the file that is there
    #[arg(short, long)]
    pub force: bool,
    /// Show no progress
    #[arg(short, long)]
    pub quiet: bool,
    /// A squashfs or SIF file or a directory
    pub image: PathBuf,
}

/// What an image can be exported to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// The root file system alone.
    Tar,
    /// For podman, skopeo, buildah and registries.
    OciArchive,
    /// For `docker load`.
    DockerArchive,
}

/// How an archive is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportCompression {
    /// Not at all.
    None,
    /// For everybody.
    Gzip,
    /// Faster and smaller; Docker reads it since version 23.
    Zstd,
}

/// What can be done with the images that are there.
#[derive(Clone, Debug, Subcommand)]
pub enum ImagesCommand {
    /// Show the images of the site's folders and of your store; the same as no command
    List,
    /// Remove images from your store
    ///
    /// What runs from one goes on. A job that waits in the queue for one will not find it.
    #[command(
        override_usage = "mizzen images remove [OPTIONS] <IMAGES>...\n       mizzen images remove [OPTIONS] --all"
    )]
    Remove {
        /// All of them
        #[arg(long, conflicts_with = "images")]
        all: bool,
        /// By reference (docker://ubuntu:24.04), by digest or its first 8 digits, by file name or path
        #[arg(required_unless_present = "all")]
        images: Vec<String>,
    },
    /// Remove images from your store that were not used for a long time, and what was left by crashes
    ///
    /// An image is used when it is imported, when a job names its reference, and when it is read, as far as the file
    /// system keeps the times of access.
    Prune {
        /// Those not used for so long: 12h, 30d, 8w; 0 for all
        #[arg(long, value_name = "AGE", default_value = "30d", value_parser = age)]
        older_than: Duration,
        /// Of every reference, keep so many that were used last, however long ago
        #[arg(long, value_name = "N", default_value_t = 0)]
        keep: usize,
        /// Only show what would be removed
        #[arg(long)]
        dry_run: bool,
    },
    /// Import again those images of your store whose tags mean another image by now
    ///
    /// The old ones stay until they are removed: jobs may wait for them.
    Update {
        /// Who the user is at the registries.
        #[command(flatten)]
        account: AccountArgs,
        /// Show no progress
        #[arg(short, long)]
        quiet: bool,
        /// As for `remove`; without any, all that came from a registry by a tag
        images: Vec<String>,
    },
}

/// Whose credentials are kept, and where.
#[derive(Clone, Debug, Args)]
pub struct LoginArgs {
    /// Your name at the registry; asked for if not given
    #[arg(short, long, value_name = "USER")]
    pub username: Option<String>,
    /// Read the password or token from standard input, in place of the terminal
    #[arg(long)]
    pub password_stdin: bool,
    /// Where to keep them, in place of the usual file
    #[arg(long, value_name = "FILE")]
    pub authfile: Option<PathBuf>,
    /// HOST[:PORT]; Docker Hub is docker.io
    pub registry: String,
}

/// Whose credentials are removed.
#[derive(Clone, Debug, Args)]
pub struct LogoutArgs {
    /// Where they are kept, in place of the usual file
    #[arg(long, value_name = "FILE")]
    pub authfile: Option<PathBuf>,
    /// HOST[:PORT]; Docker Hub is docker.io
    pub registry: String,
}

/// A number of bytes that squashfs can have as its block.
fn block_size(text: &str) -> Result<u32, String> {
    let bad = || format!("\"{}\" is not a power of two from 4k to 1m", quote(text.as_bytes()));
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        _ => return Err(bad()),
    };
    let size = digits.parse::<u32>().ok().and_then(|number| number.checked_mul(1 << shift));
    size.filter(|size| size.is_power_of_two() && (4 << 10..=1 << 20).contains(size)).ok_or_else(bad)
}

/// A time ago.
fn age(text: &str) -> Result<Duration, String> {
    let bad = || format!("\"{}\" is not an age: write 12h, 30d or 8w", quote(text.as_bytes()));
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" if digits == "0" => 0,
        "s" => 1,
        "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        "w" => 7 * 86_400,
        _ => return Err(bad()),
    };
    let seconds = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    seconds.map(Duration::from_secs).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parse(words: &[&str]) -> Result<Command, String> {
        Cli::try_parse_from(["mizzen"].iter().chain(words))
            .map(|cli| cli.command)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_and_ages_are_read() {
        for (text, size) in [("128k", 128 << 10), ("1m", 1 << 20), ("1M", 1 << 20), ("4096", 4096)] {
            assert_eq!(block_size(text), Ok(size), "{text}");
        }
        for text in ["", "k", "2k", "2m", "100k", "-4k", "4kb", "4 k", "99999999999", "4é"] {
            assert!(block_size(text).unwrap_err().ends_with("is not a power of two from 4k to 1m"), "{text}");
        }
        for (text, seconds) in
            [("0", 0), ("90s", 90), ("5min", 300), ("12h", 43_200), ("30d", 2_592_000), ("1w", 604_800)]
        {
            assert_eq!(age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "5", "d", "-1d", "1m", "1y", "1.5d", "99999999999999999999d", "9999999999999999999w"]
        {
            assert!(age(text).unwrap_err().ends_with("is not an age: write 12h, 30d or 8w"), "{text}");
        }
    }

    #[test]
    fn an_import_is_what_was_typed() {
        let Ok(Command::Import(args)) =
            parse(&["import", "-o", "a.sqsh", "docker://a", "--compressor", "xz"])
        else {
            panic!("it is an import")
        };
        assert_eq!(args.output.as_deref(), Some("a.sqsh".as_ref()));
        assert_eq!((args.source.as_encoded_bytes(), args.for_slurm), (b"docker://a".as_slice(), false));
        assert_eq!(
            (args.writing.compressor, args.writing.level, args.writing.block_size),
            (Compressor::Xz, None, 131_072)
        );
        assert!(matches!(parse(&["import", "-"]), Ok(Command::Import(args)) if args.source == "-"));
    }

    #[test]
    fn wrong_words_are_named() {
        for (words, problem) in [
            (&["import"][..], "<SOURCE>"),
            (&["import", "a", "--compressor", "lzo"], "invalid value 'lzo'"),
            (&["import", "a", "--block-size", "3k"], "\"3k\" is not a power of two from 4k to 1m"),
            (&["import", "a", "--jobs", "0"], "invalid value '0'"),
            (&["import", "a", "--username", "me"], "--password-stdin"),
            (&["import", "a", "--password-stdin"], "--username"),
            (&["images", "remove"], "<IMAGES>..."),
            (&["images", "prune", "--older-than", "1y"], "\"1y\" is not an age"),
            (&["export", "a", "--format", "zip"], "invalid value 'zip'"),
            (&["login"], "<REGISTRY>"),
        ] {
            let message = parse(words).unwrap_err();
            assert!(message.contains(problem), "{words:?}: {message}");
        }
    }

    #[test]
    fn images_alone_lists() {
        assert!(matches!(parse(&["images", "--json"]), Ok(Command::Images { json: true, command: None })));
        assert!(matches!(
            parse(&["images", "list", "--json"]),
            Ok(Command::Images { json: true, command: Some(ImagesCommand::List) })
        ));
    }

    #[test]
    fn a_password_cannot_be_a_word_of_the_command_line() {
        for words in [&["import", "a", "--password", "x"][..], &["login", "r", "--password", "x"]] {
            assert!(parse(words).unwrap_err().contains("unexpected argument '--password'"), "{words:?}");
        }
    }
}
