//! Where the settings of the site are: mizzen.toml, and beside it the directory of the files that add to it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::Failure;
use crate::failure::quote;
use crate::plugstack;

/// Where the file is unless plugstack.conf says `config=PATH`.
pub const DEFAULT_PATH: &str = "/etc/mizzen/mizzen.toml";

/// Which file to read, and whether it may be missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The default file; without it the built-in defaults hold.
    Default,
    /// A file that the administrator named; it has to be there.
    Named(PathBuf),
}

impl Source {
    /// The file that the words behind the plugin in plugstack.conf name.
    pub fn from_arguments<'a>(arguments: impl IntoIterator<Item = &'a [u8]>) -> Result<Source, Failure> {
        let mut source = Source::Default;
        for argument in arguments {
            match argument.strip_prefix(b"config=") {
                Some(path) if !path.is_empty() && source != Source::Default => {
                    return Err(Failure::new(format!("plugstack.conf: config= twice: \"{}\"", quote(path)))
                        .hint("give spank_mizzen.so one mizzen.toml"));
                }
                Some(path) if !path.is_empty() && !path.starts_with(b"/") => {
                    return Err(Failure::new(format!(
                        "plugstack.conf: config={} is not absolute",
                        quote(path)
                    ))
                    .hint("write the whole path, beginning with /"));
                }
                Some(path) if !path.is_empty() => {
                    source = Source::Named(PathBuf::from(OsStr::from_bytes(path)))
                }
                _ => {
                    return Err(Failure::new(format!(
                        "plugstack.conf: unknown argument \"{}\"",
                        quote(argument)
                    ))
                    .hint("the only argument of spank_mizzen.so is config=/path/to/mizzen.toml"));
                }
            }
        }
        Ok(source)
    }

    /// The file that the plugin reads on this machine, for who is started by hand: in a job step the plugin tells it.
    pub fn of_this_machine() -> Result<Source, Failure> {
        match plugstack::find() {
            Some(line) => Source::from_arguments(line.arguments.iter().map(|word| word.as_bytes())),
            None => Ok(Source::Default),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        match self {
            Source::Default => Path::new(DEFAULT_PATH),
            Source::Named(path) => path,
        }
    }

    /// The directory of its drop-ins: the file's name with `.d` for `.toml`, or behind any other.
    pub fn drop_in_directory(&self) -> PathBuf {
        let path = self.path();
        match path.extension() {
            Some(extension) if extension == "toml" => path.with_extension("d"),
            _ => {
                let mut name = path.as_os_str().to_owned();
                name.push(".d");
                name.into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_ins_are_beside_the_file() {
        let directory = |path: &str| Source::Named(path.into()).drop_in_directory();
        assert_eq!(Source::Default.drop_in_directory(), Path::new("/etc/mizzen/mizzen.d"));
        assert_eq!(directory("/srv/mizzen.toml"), Path::new("/srv/mizzen.d"));
        assert_eq!(directory("/srv/mizzen.conf"), Path::new("/srv/mizzen.conf.d"));
        assert_eq!(directory("/srv/mizzen"), Path::new("/srv/mizzen.d"));
        assert_eq!(directory("/srv/site.d"), Path::new("/srv/site.d.d"));
    }

    #[test]
    fn the_only_argument_names_a_file() {
        let source = |words: &[&str]| {
            Source::from_arguments(words.iter().map(|word| word.as_bytes()))
                .map_err(|failure| failure.message)
        };
        assert_eq!(source(&[]), Ok(Source::Default));
        assert_eq!(source(&["config=/srv/m.toml"]), Ok(Source::Named("/srv/m.toml".into())));
        for (words, message) in [
            (&["config=/a", "config=/b"][..], "plugstack.conf: config= twice: \"/b\""),
            (&["config=a"][..], "plugstack.conf: config=a is not absolute"),
            (&["config="][..], "plugstack.conf: unknown argument \"config=\""),
            (&["conf=/a"][..], "plugstack.conf: unknown argument \"conf=/a\""),
        ] {
            assert_eq!(source(words), Err(message.to_owned()));
        }
    }
}
