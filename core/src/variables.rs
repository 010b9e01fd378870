//! The variables that stand for options: `MIZZEN_CONTAINER` (or `MIZZEN_CONTAINER_IMAGE`) for the image, `MIZZEN_ENVIRONMENT` (or
//! `MIZZEN_EDF`) for an environment file, and one for each setting, as `MIZZEN_CONTAINER_MOUNTS`. srun, sbatch and
//! salloc read them in their own environment as the user; the node reads them in the job's, where the client had no mizzen to do so.
//!
//! Those of pyxis, as `PYXIS_CONTAINER_MOUNTS`, are read as well, for scripts that were written for it. Ours win.

use crate::failure::quote;
use crate::failure::quote_reference;
use crate::settings::{Key, Off, TomlForm};
use crate::similar::similar;
use crate::{Failure, Settings};

/// The image; also what all other names begin with.
pub const IMAGE: &str = "MIZZEN_CONTAINER";
/// The same: the name that follows from `--container-image`.
pub const IMAGE_TOO: &str = "MIZZEN_CONTAINER_IMAGE";

/// An environment file, by the names of its two options.
const ENVIRONMENT: [&str; 2] = ["MIZZEN_ENVIRONMENT", "MIZZEN_EDF"];
/// The image, by pyxis's name for it.
const PYXIS_IMAGE: &str = "PYXIS_CONTAINER_IMAGE";
/// What the names of pyxis's variables begin with.
const PYXIS: &str = "PYXIS_CONTAINER_";

/// The name of a container, which may do without an image.
const NAMES: [&str; 2] = ["MIZZEN_CONTAINER_NAME", "PYXIS_CONTAINER_NAME"];

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
            None => {
                name.starts_with(PYXIS.as_bytes()) || ENVIRONMENT.iter().any(|known| known.as_bytes() == name)
            }
        };
        let found = environment.into_iter().filter(|(name, _)| ours(name));
        Variables(found.map(|(name, value)| (name.to_vec(), value.to_vec())).collect())
    }

    /// Whether one of them names an image, an environment file or a container, however badly.
    pub fn ask_for_container(&self) -> bool {
        [IMAGE, IMAGE_TOO].into_iter().chain(ENVIRONMENT).any(|name| self.value(name).is_some())
            || self.pyxis_image().is_some()
            || self.name_a_container()
    }

    /// Whether one of them names a container.
    pub fn name_a_container(&self) -> bool {
        NAMES.into_iter().any(|name| self.value(name).is_some_and(|name| !name.is_empty()))
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
            (None, None) => Ok(self.pyxis_image().map(|value| (PYXIS_IMAGE, value))),
        }
    }

    /// As pyxis does, an empty one is not taken for a name.
    fn pyxis_image(&self) -> Option<&[u8]> {
        self.value(PYXIS_IMAGE).filter(|value| !value.is_empty())
    }

    /// The settings. To be asked for only where there is a container: a name or value that is wrong must not end a job
    /// that has none.
    pub fn settings(&self) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for (name, value) in self.0.iter().filter(|(name, _)| !name.starts_with(PYXIS.as_bytes())) {
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
        Ok(settings.or(self.pyxis_settings()?))
    }

    /// What pyxis's variables say. Of its own future ones, and of values that pyxis ignores, nothing is said.
    fn pyxis_settings(&self) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for key in Key::ALL {
            if self.value(&key.variable()).is_some_and(|value| !value.is_empty()) {
                continue;
            }
            let variable = |name: &str| format!("{PYXIS}{}", name.to_uppercase().replace('-', "_"));
            let word = |value: bool| if value { b"yes".as_slice() } else { b"no" };
            let is_switch = key.toml_form() == TomlForm::Boolean;
            let on = variable(key.name());
            let value = self.value(&on).filter(|value| !value.is_empty());
            let mut found =
                vec![(on.clone(), if is_switch { value.and_then(pyxis_bool).map(word) } else { value })];
            if let Some(Off::Named(name, _)) = key.spec().off {
                let off = variable(name);
                let value = self.value(&off).and_then(pyxis_bool);
                found.push((off, value.map(|value| word(!value))));
            }
            for (name, text) in found {
                let Some(text) = text else { continue };
                settings.set(*key, text).map_err(|failure| failure.about(name))?;
            }
        }
        Ok(settings)
    }

    fn value(&self, name: &str) -> Option<&[u8]> {
        let found = self.0.iter().find(|(known, _)| known == name.as_bytes());
        found.map(|(_, value)| value.as_slice())
    }
}

/// A switch as pyxis reads it in a variable; it ignores everything else.
fn pyxis_bool(value: &[u8]) -> Option<bool> {
    match value {
        b"1" | b"true" | b"yes" | b"y" => Some(true),
        b"0" | b"false" | b"no" | b"n" => Some(false),
        _ => None,
    }
}

fn unknown(name: &[u8]) -> Failure {
    let failure = Failure::new(format!("{}: there is no such variable of mizzen's", quote(name)));
    let settings = || Key::ALL.iter().map(|key| key.variable());
    if let Some(meant) = similar(&quote(name), settings().chain([IMAGE_TOO.to_owned()])) {
        return failure.hint(format!("did you mean {meant}?"));
    }
    let known: Vec<String> = settings().map(|variable| variable[IMAGE.len()..].to_owned()).collect();
    failure
        .hint(format!("there are {IMAGE} and {IMAGE_TOO}, and with the same beginning {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Workdir, Writable};

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
    fn the_controllers_plugin_knows_all_that_ask_for_a_container() {
        let lua = include_str!("../../conf/job_submit.lua");
        let asking = [IMAGE, IMAGE_TOO, PYXIS_IMAGE].into_iter().chain(ENVIRONMENT).chain(NAMES);
        for name in asking {
            assert!(variables(&[(name, "a")]).ask_for_container(), "{name}");
            let known = lua.contains(&format!("environment.{name}")) || lua.contains(&format!("\"{name}\""));
            assert!(known, "conf/job_submit.lua does not know {name}");
        }
    }

    #[test]
    fn both_names_mean_an_environment_file() {
        for name in ENVIRONMENT {
            let one = variables(&[(name, "torch"), ("MIZZEN_ENVIRONMENTS", "no")]);
            assert_eq!(one.environment(), Ok(Some((name, b"torch".as_slice()))));
            assert!(one.ask_for_container() && one.settings() == Ok(Settings::default()));
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
        let hint_of = |name: &'static str| variables(&[(name, "a")]).settings().unwrap_err().hint.unwrap();
        for (name, meant) in [
            ("MIZZEN_CONTAINER_MOUNT", "MIZZEN_CONTAINER_MOUNTS"),
            ("MIZZEN_CONTAINER_WRITEABLE", "MIZZEN_CONTAINER_WRITABLE"),
            ("MIZZEN_CONTAINER_IMGAE", "MIZZEN_CONTAINER_IMAGE"),
        ] {
            assert_eq!(hint_of(name), format!("did you mean {meant}?"));
        }
        let hint = hint_of("MIZZEN_CONTAINER_COLOUR");
        assert!(
            hint.contains("MIZZEN_CONTAINER_IMAGE, and with the same beginning _MOUNTS, _ENV,"),
            "{hint}"
        );
    }

    #[test]
    fn variables_of_pyxis_stand_for_ours_where_those_say_nothing() {
        let image = variables(&[("PYXIS_CONTAINER_IMAGE", "a"), ("PYXIS_CONTAINER_MOUNT_HOME", "y")]);
        assert!(image.ask_for_container());
        assert_eq!(image.image(), Ok(Some((PYXIS_IMAGE, b"a".as_slice()))));
        assert_eq!(image.settings(), Ok(Settings { mount_home: Some(true), ..Settings::default() }));
        let both = variables(&[("PYXIS_CONTAINER_IMAGE", "a"), (IMAGE, "b")]);
        assert_eq!(both.image(), Ok(Some((IMAGE, b"b".as_slice()))));
        assert!(!variables(&[("PYXIS_CONTAINER_IMAGE", ""), ("PYXIS_CONTAINER", "a")]).ask_for_container());
        // "Booleans in variables: exactly `1 true yes y` or `0 false no n`; other values are ignored."
        for (value, expected) in [
            ("1", Some(true)),
            ("true", Some(true)),
            ("yes", Some(true)),
            ("y", Some(true)),
            ("0", Some(false)),
            ("false", Some(false)),
            ("no", Some(false)),
            ("n", Some(false)),
            ("Y", None),
            ("on", None),
            ("2", None),
            ("", None),
        ] {
            let found = variables(&[("PYXIS_CONTAINER_REMAP_ROOT", value)]).settings();
            assert_eq!(found, Ok(Settings { remap_root: expected, ..Settings::default() }), "{value}");
        }
        for (name, value, expected) in [
            ("PYXIS_CONTAINER_WRITABLE", "1", Some(Writable::Yes)),
            ("PYXIS_CONTAINER_WRITABLE", "2g", None),
            ("PYXIS_CONTAINER_READONLY", "1", Some(Writable::No)),
            ("PYXIS_CONTAINER_READONLY", "0", Some(Writable::Yes)),
            ("PYXIS_CONTAINER_OF_TOMORROW", "1", None),
        ] {
            let found = variables(&[(name, value)]).settings();
            assert_eq!(found, Ok(Settings { writable: expected, ..Settings::default() }), "{name}={value}");
        }
        // Ours win, and then it does not matter what is wrong with theirs.
        let ours = variables(&[("MIZZEN_CONTAINER_MOUNTS", "/a:/b"), ("PYXIS_CONTAINER_MOUNTS", "/a:b")]);
        assert_eq!(ours.settings().unwrap().mounts.unwrap().len(), 1);
        let theirs = variables(&[("PYXIS_CONTAINER_MOUNTS", "/a:b")]).settings().unwrap_err();
        assert_eq!(theirs.message, "PYXIS_CONTAINER_MOUNTS: \"/a:b\": the destination is not absolute");
    }
}
