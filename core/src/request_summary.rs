//! What a container was asked to be, in one line for Slurm's log. The values of variables are left out: they may be secrets.

use std::fmt::{self, Display};
use std::os::unix::ffi::OsStrExt;

use crate::failure::quote_up_to;
use crate::options::{EnvOption, MountSource};
use crate::request::{Container, ImageSource};
use crate::settings::Key;

/// Recognises a kind of mounts.
type IsKind = fn(&MountSource) -> bool;

/// Slurm's log has no room for more of what users write.
const LIMIT: usize = 400;

/// Shows a container: its image, how much is mounted, and its other settings.
pub struct Summary<'a>(pub &'a Container);

impl Display for Summary<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Container { image, settings } = self.0;
        match image {
            ImageSource::File { path, digest } => {
                write!(out, "{}", quote_up_to(path.as_os_str().as_bytes(), LIMIT))?;
                digest.iter().try_for_each(|digest| write!(out, "@{digest}"))?;
            }
            ImageSource::Stored { reference, .. } | ImageSource::Unfetched(reference) => {
                write!(out, "{}", quote_up_to(reference.to_string().as_bytes(), LIMIT))?;
            }
            ImageSource::Recorded => write!(out, "a container that is there")?,
        }
        let mounts = || settings.mounts.iter().flatten();
        let kinds: [(&str, IsKind); 4] = [
            ("mounted", |source| matches!(source, MountSource::Bind(_))),
            ("squashfs", |source| matches!(source, MountSource::Squashfs(_))),
            ("tmpfs", |source| matches!(source, MountSource::Tmpfs(_))),
            ("unmounted", |source| matches!(source, MountSource::Umount)),
        ];
        for (name, is_kind) in kinds {
            match mounts().filter(|mount| is_kind(&mount.source)).count() {
                0 => {}
                count => write!(out, ", {count} {name}")?,
            }
        }
        let names: Vec<&[u8]> =
            settings.environment.iter().flatten().map(EnvOption::name).map(OsStrExt::as_bytes).collect();
        if !names.is_empty() {
            write!(out, ", variables {}", quote_up_to(&names.join(&b' '), LIMIT))?;
        }
        let others = Key::ALL.iter().filter(|key| ![Key::Mounts, Key::Env].contains(*key));
        for key in others {
            if let Some(text) = settings.text(*key) {
                write!(out, ", {}={}", key.name(), quote_up_to(&text, LIMIT))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::settings::Workdir;

    #[test]
    fn all_but_values_of_variables_is_told() {
        let mut settings = Settings::default();
        for (key, text) in [
            (Key::Mounts, "/a:/b,/c,tmpfs:/t,/d.sqsh:/d:squashfs"),
            (Key::Env, "B,TOKEN=secret"),
            (Key::Writable, "2g"),
            (Key::Workdir, "/w\n"),
        ] {
            let _ = settings.set(key, text.as_bytes());
        }
        settings.workdir = Some(Workdir::Directory("/w\n".into()));
        let container = Container { image: ImageSource::file("/tf.sqsh"), settings };
        assert_eq!(
            Summary(&container).to_string(),
            "/tf.sqsh, 2 mounted, 1 squashfs, 1 tmpfs, variables B TOKEN, workdir=/w\\n, writable=2g"
        );
    }
}
