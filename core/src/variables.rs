//! The variables that stand for options: `MIZZEN_CONTAINER` (or `MIZZEN_CONTAINER_IMAGE`) for the image, and one for each
//! setting, as `MIZZEN_CONTAINER_MOUNTS`. srun, sbatch and salloc read them in their own environment as the user; the node
//! reads them in the job's, where the client had no mizzen to do so.

use crate::failure::quote;
use crate::failure::quote_reference;
use crate::settings::Key;
use crate::{Failure, Settings};

/// The image; also what all other names begin with.
const IMAGE: &str = "MIZZEN_CONTAINER";
/// The same: the name that follows from `--container-image`.
const IMAGE_TOO: &str = "MIZZEN_CONTAINER_IMAGE";

/// The name of a container, which may do without an image.
const NAME: &str = "MIZZEN_CONTAINER_NAME";

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
            None => false,
        };
        let found = environment.into_iter().filter(|(name, _)| ours(name));
        Variables(found.map(|(name, value)| (name.to_vec(), value.to_vec())).collect())
    }

    /// Whether one of them names an image or a container, however badly.
    pub fn ask_for_container(&self) -> bool {
        [IMAGE, IMAGE_TOO].into_iter().any(|name| self.value(name).is_some()) || self.name_a_container()
    }

    /// Whether one of them names a container.
    pub fn name_a_container(&self) -> bool {
        self.value(NAME).is_some_and(|name| !name.is_empty())
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
                None if [IMAGE, IMAGE_TOO].iter().any(|known| known.as_bytes() == name) => {}
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

    fn variables(pairs: &[(&'static str, &'static str)]) -> Variables {
        Variables::of(pairs.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
    }

    #[test]
    fn both_names_mean_the_image() {
        for name in [IMAGE, IMAGE_TOO] {
            let one = variables(&[("HOME", "/"), (name, "a.sqsh"), ("MIZZEN_CONTAINERS", "no")]);
            assert_eq!(one.image(), Ok(Some((name, b"a.sqsh".as_slice()))));
            assert!(one.ask_for_container() && one.settings() == Ok(Settings::default()));
        }
        assert_eq!(variables(&[(IMAGE, "a"), (IMAGE_TOO, "a")]).image(), Ok(Some((IMAGE, b"a".as_slice()))));
        let two = variables(&[(IMAGE, "a"), (IMAGE_TOO, "b")]).image().unwrap_err();
        let message = "MIZZEN_CONTAINER=a and MIZZEN_CONTAINER_IMAGE=b: two images for one container";
        assert_eq!(two.message, message);
        assert!(!variables(&[("MIZZEN_CONTAINER_MOUNTS", "/a")]).ask_for_container());
        assert!(variables(&[("MIZZEN_CONTAINER_NAME", "dev")]).ask_for_container());
        assert!(!variables(&[("MIZZEN_CONTAINER_NAME", "")]).ask_for_container());
    }

    #[test]
    fn settings_are_found_and_others_named() {
        let good = variables(&[("MIZZEN_CONTAINER_WORKDIR", "/a"), ("MIZZEN_CONTAINER_WRITABLE", "")]);
        let workdir = Settings { workdir: Some("/a".into()), ..Settings::default() };
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
