//! The variables that stand for options: `MIZZEN_CONTAINER` (or `MIZZEN_CONTAINER_IMAGE`) for the image, `MIZZEN_ENVIRONMENT` (or
//! `MIZZEN_EDF`) for an environment file, and one for each setting, as `MIZZEN_CONTAINER_MOUNTS`. srun, sbatch and salloc read them in their own environment as the user; the node
//! reads them in the job's, where the client had no mizzen to do so.

use crate::failure::quote;
use crate::failure::quote_reference;
use crate::settings::Key;
use crate::{Failure, Settings};

/// The image; also what all other names begin with.
pub const IMAGE: &str = "MIZZEN_CONTAINER";
/// The same: the name that follows from `--container-image`.
pub const IMAGE_TOO: &str = "MIZZEN_CONTAINER_IMAGE";

/// An environment file, by the names of its two options.
const ENVIRONMENT: [&str; 2] = ["MIZZEN_ENVIRONMENT", "MIZZEN_EDF"];

/// Those of the variables that an environment has, with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables(Vec<(Vec<u8>, Vec<u8>)>);

impl Variables {
    /// None of them.
    pub const NONE: Variables = Variables(Vec::new());

    /// Picks them out of an environment's names and values.
    pub fn of<'a>(environment: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Variables {
        let ours = |name: &[u8]| match name.strip_prefix(IMAGE.as_bytes()) {
            Some(rest) => rest.is_empty() || rest.starts_with(b"_"),
            None => ENVIRONMENT.iter().any(|known| known.as_bytes() == name),
        };
        let found = environment.into_iter().filter(|(name, _)| ours(name));
        Variables(found.map(|(name, value)| (name.to_vec(), value.to_vec())).collect())
    }

    /// Whether one of them names an image or an environment file, however badly.
    pub fn name_a_container(&self) -> bool {
        [IMAGE, IMAGE_TOO].into_iter().chain(ENVIRONMENT).any(|name| self.value(name).is_some())
    }

    /// The environment file, and the variable that names it.
    pub fn environment(&self) -> Result<Option<(&'static str, &[u8])>, Failure> {
        let found: Vec<_> = ENVIRONMENT.iter().filter_map(|name| Some((*name, self.value(name)?))).collect();
        match found.as_slice() {
            [(one, value), (other, second)] if value != second => {
                let [value, second] = [value, second].map(|value| quote(value));
                Err(Failure::new(format!("{one}={value} and {other}={second}: two environment files"))
                    .hint("both mean the same: unset one of them, or give the file with --environment"))
            }
            found => Ok(found.first().copied()),
        }
    }

    /// The image, and the variable that names it.
    pub fn image(&self) -> Result<Option<(&'static str, &[u8])>, Failure> {
        match (self.value(IMAGE), self.value(IMAGE_TOO)) {
            (Some(one), Some(other)) if one != other => {
                let message =
                    format!("{IMAGE}={} and {IMAGE_TOO}={}", quote_reference(one), quote_reference(other));
                Err(Failure::new(format!("{message}: two images for one container"))
                    .hint("both mean the same: unset one of them, or give the image with --container"))
            }
            (Some(value), _) => Ok(Some((IMAGE, value))),
            (None, Some(value)) => Ok(Some((IMAGE_TOO, value))),
            (None, None) => Ok(None),
        }
    }

    /// The settings. To be asked for only where there is a container: a name or value that is wrong must not end a job
    /// that has none.
    pub fn settings(&self) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for (name, value) in &self.0 {
            match Key::ALL.iter().find(|key| key.variable().as_bytes() == name) {
                Some(_) if value.is_empty() => {}
                Some(key) => settings.set(*key, value).map_err(|failure| failure.about(key.variable()))?,
                None if [IMAGE, IMAGE_TOO]
                    .iter()
                    .chain(&ENVIRONMENT)
                    .any(|known| known.as_bytes() == name) => {}
                None => return Err(unknown(name)),
            }
        }
        Ok(settings)
    }

    fn value(&self, name: &str) -> Option<&[u8]> {
        let found = self.0.iter().find(|(known, _)| known == name.as_bytes());
        found.map(|(_, value)| value.as_slice())
    }
}

fn unknown(name: &[u8]) -> Failure {
    let known: Vec<String> = Key::ALL.iter().map(|key| key.variable()[IMAGE.len()..].to_owned()).collect();
    Failure::new(format!("{}: there is no such variable of mizzen's", quote(name)))
        .hint(format!("there are {IMAGE} and {IMAGE_TOO}, and with the same beginning {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Workdir;

    fn variables(pairs: &[(&'static str, &'static str)]) -> Variables {
        Variables::of(pairs.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
    }

    #[test]
    fn both_names_mean_the_image() {
        for name in [IMAGE, IMAGE_TOO] {
            let one = variables(&[("HOME", "/"), (name, "a.sqsh"), ("MIZZEN_CONTAINERS", "no")]);
            assert_eq!(one.image(), Ok(Some((name, b"a.sqsh".as_slice()))));
            assert!(one.name_a_container() && one.settings() == Ok(Settings::default()));
        }
        assert_eq!(variables(&[(IMAGE, "a"), (IMAGE_TOO, "a")]).image(), Ok(Some((IMAGE, b"a".as_slice()))));
        let two = variables(&[(IMAGE, "a"), (IMAGE_TOO, "b")]).image().unwrap_err();
        let message = "MIZZEN_CONTAINER=a and MIZZEN_CONTAINER_IMAGE=b: two images for one container";
        assert_eq!(two.message, message);
        assert!(!variables(&[("MIZZEN_CONTAINER_MOUNTS", "/a")]).name_a_container());
    }

    #[test]
    fn both_names_mean_an_environment_file() {
        for name in ENVIRONMENT {
            let one = variables(&[(name, "torch"), ("MIZZEN_ENVIRONMENTS", "no")]);
            assert_eq!(one.environment(), Ok(Some((name, b"torch".as_slice()))));
            assert!(one.name_a_container() && one.settings() == Ok(Settings::default()));
        }
        let two = variables(&[("MIZZEN_EDF", "b"), ("MIZZEN_ENVIRONMENT", "a")]).environment().unwrap_err();
        assert_eq!(two.message, "MIZZEN_ENVIRONMENT=a and MIZZEN_EDF=b: two environment files");
    }

    #[test]
    fn settings_are_found_and_others_named() {
        let good = variables(&[("MIZZEN_CONTAINER_WORKDIR", "/a"), ("MIZZEN_CONTAINER_WRITABLE", "")]);
        let directory = Workdir::Directory("/a".into());
        let workdir = Settings { workdir: Some(directory), ..Settings::default() };
        assert_eq!(good.settings(), Ok(workdir));
        for (name, value, message) in [
            ("MIZZEN_CONTAINER_WRITABLE", "x", "MIZZEN_CONTAINER_WRITABLE: \"x\" is not a size"),
            ("MIZZEN_CONTAINER_MOUNT", "/a", "MIZZEN_CONTAINER_MOUNT: there is no such variable of mizzen's"),
            ("MIZZEN_CONTAINER_", "", "MIZZEN_CONTAINER_: there is no such variable of mizzen's"),
        ] {
            assert_eq!(variables(&[(name, value)]).settings().unwrap_err().message, message);
        }
        let hint = variables(&[("MIZZEN_CONTAINER_MOUNT", "/a")]).settings().unwrap_err().hint.unwrap();
        assert!(
            hint.contains("MIZZEN_CONTAINER_IMAGE, and with the same beginning _MOUNTS, _ENV,"),
            "{hint}"
        );
    }
}
