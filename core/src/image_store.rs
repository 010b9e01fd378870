//! Where a user's image store is: `image_store` of mizzen.toml, with the user's name in it, or the user's data directory.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use crate::failure::quote;
use crate::{Failure, accounts};

/// Below the user's data directory, where mizzen.toml names none.
const DEFAULT: &str = "mizzen/images";

/// Whose store it is.
#[derive(Clone, Copy, Debug)]
pub struct StoreOwner<'a> {
    /// The user's name, if it is known.
    pub name: Option<&'a [u8]>,
    /// The user's number.
    pub uid: u32,
    /// XDG_DATA_HOME, if it is set.
    pub data_home: Option<&'a OsStr>,
    /// HOME, if it is set.
    pub home: Option<&'a OsStr>,
}

/// The directory of the images of the user who runs this. All who look for it, on all machines, ask here.
pub fn own_directory(image_store: &str) -> Result<PathBuf, Failure> {
    let uid = geteuid().as_raw();
    let user = std::env::var_os("USER").map(OsString::into_vec);
    let name = accounts::name_of(uid).map(String::into_bytes).or(user);
    let (data_home, home) = (std::env::var_os("XDG_DATA_HOME"), std::env::var_os("HOME"));
    let owner =
        StoreOwner { name: name.as_deref(), uid, data_home: data_home.as_deref(), home: home.as_deref() };
    store_directory(image_store, owner)
}

/// The directory of this user's images. Only names it: whether it can be used is seen by the one who opens it.
pub fn store_directory(image_store: &str, owner: StoreOwner) -> Result<PathBuf, Failure> {
    if !image_store.is_empty() {
        return expand(image_store, owner);
    }
    // As the specification of XDG_DATA_HOME says, a relative path in it does not count.
    let absolute = |text: &OsStr| Path::new(text).is_absolute();
    match (owner.data_home.filter(|text| absolute(text)), owner.home.filter(|text| absolute(text))) {
        (Some(data_home), _) => Ok(Path::new(data_home).join(DEFAULT)),
        (None, Some(home)) => Ok(Path::new(home).join(".local/share").join(DEFAULT)),
        (None, None) => Err(Failure::new("no directory for images: HOME is not set")
            .hint("set HOME, or XDG_DATA_HOME; a site names a directory with image_store in mizzen.toml")),
    }
}

/// What is wrong with the key's value, whoever the user is.
pub(crate) fn check(image_store: &str) -> Result<(), Failure> {
    if image_store.is_empty() {
        return Ok(());
    }
    if !image_store.starts_with('/') {
        return Err(Failure::new(format!("{image_store:?} is not absolute"))
            .hint("write the whole path, beginning with /"));
    }
    let owner = |name, uid| StoreOwner { name: Some(name), uid, data_home: None, home: None };
    // In a directory of several users one could put a file in the place of another's image.
    if expand(image_store, owner(b"a", 1))? == expand(image_store, owner(b"b", 2))? {
        return Err(Failure::new(format!("{image_store:?} is one directory for all users"))
            .hint("write %u for the user's name or %U for the user's number: /scratch/%u/images"));
    }
    Ok(())
}

/// Puts the user's name for `%u`, the number for `%U`, a percent sign for `%%`.
fn expand(image_store: &str, owner: StoreOwner) -> Result<PathBuf, Failure> {
    let mut path = Vec::new();
    let mut rest = image_store.bytes();
    while let Some(byte) = rest.next() {
        match (byte, if byte == b'%' { rest.next() } else { None }) {
            (b'%', Some(b'u')) => path.extend_from_slice(user_name(owner)?),
            (b'%', Some(b'U')) => path.extend_from_slice(owner.uid.to_string().as_bytes()),
            (b'%', Some(b'%')) => path.push(b'%'),
            (b'%', _) => {
                return Err(Failure::new(format!("{image_store:?}: what stands behind a % is not known"))
                    .hint("there are %u for the user's name, %U for the user's number, and %% for a %"));
            }
            (byte, _) => path.push(byte),
        }
    }
    Ok(PathBuf::from(OsString::from_vec(path)))
}

/// The name, if it can be a part of a path: it may come from the user's own environment.
fn user_name<'a>(owner: StoreOwner<'a>) -> Result<&'a [u8], Failure> {
    let name = owner.name.filter(|name| !name.is_empty()).ok_or_else(|| {
        Failure::new(format!("image_store: the name of user {} is not known", owner.uid))
            .hint("write %U, the user's number, in mizzen.toml")
    })?;
    if name == b"." || name == b".." || name.iter().any(|byte| *byte == b'/' || byte.is_ascii_control()) {
        return Err(Failure::new(format!("image_store: \"{}\" is not a user's name", quote(name))));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(image_store: &str, name: Option<&str>, data_home: Option<&str>, home: Option<&str>) -> String {
        let owner = StoreOwner {
            name: name.map(str::as_bytes),
            uid: 2001,
            data_home: data_home.map(OsStr::new),
            home: home.map(OsStr::new),
        };
        match store_directory(image_store, owner) {
            Ok(path) => path.display().to_string(),
            Err(failure) => failure.message,
        }
    }

    #[test]
    fn every_user_has_a_directory() {
        let (alice, home) = (Some("alice"), Some("/home/alice"));
        for (image_store, name, data_home, home, expected) in [
            ("", alice, None, home, "/home/alice/.local/share/mizzen/images"),
            ("", None, Some("/data"), home, "/data/mizzen/images"),
            ("", alice, Some("data"), home, "/home/alice/.local/share/mizzen/images"),
            ("", alice, Some(""), None, "no directory for images: HOME is not set"),
            ("/scratch/%u/images", alice, Some("/data"), home, "/scratch/alice/images"),
            ("/scratch/%U-100%%/%u", alice, None, None, "/scratch/2001-100%/alice"),
            ("/s/%U", None, None, None, "/s/2001"),
            ("/s/%u", None, None, None, "image_store: the name of user 2001 is not known"),
            ("/s/%u", Some(""), None, None, "image_store: the name of user 2001 is not known"),
            ("/s/%u", Some("../bob"), None, None, "image_store: \"../bob\" is not a user's name"),
            ("/s/%u", Some(".."), None, None, "image_store: \"..\" is not a user's name"),
        ] {
            assert_eq!(store(image_store, name, data_home, home), expected, "{image_store}");
        }
    }

    #[test]
    fn what_no_user_could_use_is_refused() {
        for good in ["", "/scratch/%u", "/%U"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, message) in [
            ("images/%u", "\"images/%u\" is not absolute"),
            ("/images", "\"/images\" is one directory for all users"),
            ("/images/%%u", "\"/images/%%u\" is one directory for all users"),
            ("/images/%x", "\"/images/%x\": what stands behind a % is not known"),
            ("/images/%u%", "\"/images/%u%\": what stands behind a % is not known"),
        ] {
            assert_eq!(check(bad).unwrap_err().message, message);
        }
    }
}
