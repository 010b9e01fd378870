//! Which container a job or step gets, of all that are asked for. Runs in srun, sbatch and salloc, as the user.
//!
//! Each setting by itself comes from the first of these that has it: an option, the container that the enclosing job hands
//! down, a variable MIZZEN_CONTAINER_…; mizzen.toml is left to the node. Mounts and variables of a step are added to the job's.
//!
//! An environment file counts as an option, below those that were typed: these are added to what it says. It describes a whole
//! container, so a step that names one takes nothing of the enclosing job's.

use std::path::PathBuf;

use crate::environment::{Environment, names_environment_file};
use crate::failure::quote_reference;
use crate::request::{Container, ImageSource, NONE};
use crate::settings::{Key, NameMode, Value};
use crate::{Failure, Request, Settings, Variables};

/// What was typed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TypedOptions {
    /// The image, or what stands for it.
    pub image: Option<ImageOption>,
    /// `--environment` or `--edf`.
    pub environment: Option<EnvironmentOption>,
    /// `--container-join`.
    pub join: Option<Vec<u8>>,
    /// The settings.
    pub settings: Settings,
    /// The first option that was typed, for messages.
    pub first_option: Option<String>,
}

/// What names the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageOption {
    /// An option or variable, and its value.
    Image {
        /// Its name in messages.
        option: String,
        /// What it says.
        value: Vec<u8>,
    },
    /// `--container`, where Slurm runs containers itself.
    SlurmRuntime,
}

/// What names an environment file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentOption {
    /// The option or variable, as messages name it.
    pub option: String,
    /// What it says.
    pub value: Vec<u8>,
}

/// What the merger has to ask for.
pub trait ImageLookup {
    /// Finds the image, and sees that it is one.
    fn find_image(&mut self, option: &str, value: &[u8]) -> Result<Request, Failure>;

    /// Reads an environment file, and tells its notes.
    fn read_environment(&mut self, option: &str, value: &[u8]) -> Result<Environment, Failure>;

    /// Where relative paths begin.
    fn directory(&mut self) -> Result<PathBuf, Failure>;

    /// Where relative paths inside begin: a directory to start in, and a mount that names no destination.
    fn directory_inside(&mut self) -> Result<PathBuf, Failure> {
        self.directory()
    }
}

/// The request, if a container is asked for. `inherited` is that of the enclosing job; the variables count only where there
/// is none.
pub fn merge(
    typed: TypedOptions,
    inherited: Option<Request>,
    variables: &Variables,
    lookup: &mut dyn ImageLookup,
) -> Result<Option<Request>, Failure> {
    if let Some(step) = &typed.join {
        if typed.image.is_some() || typed.environment.is_some() || typed.settings != Settings::default() {
            return Err(Failure::new("--container-join and other options of a container")
                .hint("the container of the other step is taken as it is"));
        }
        return Request::from_join(step).map(Some).map_err(|failure| failure.about("--container-join"));
    }
    let (image, environment) = match (typed.image, typed.environment) {
        (None, None) if inherited.is_none() => {
            let image = variables.image()?.map(|(name, value)| (name.to_owned(), value.to_vec()));
            let file = variables.environment()?.map(|(name, value)| (name.to_owned(), value.to_vec()));
            (
                image.map(|(option, value)| ImageOption::Image { option, value }),
                file.map(|(option, value)| EnvironmentOption { option, value }),
            )
        }
        typed => typed,
    };
    let (image, environment) = take_file(image, environment)?;
    let file = match &environment {
        Some(EnvironmentOption { option, value }) => Some(lookup.read_environment(option, value)?),
        None => None,
    };
    let image = match (&file, &environment, image) {
        (Some(file), Some(environment), None) => Some(image_of(file, &environment.option)?),
        (_, _, image) => image,
    };
    let typed_image = image.clone();
    let named = typed.settings.name.is_some()
        || inherited.is_none() && image.is_none() && variables.name_a_container();
    // Not before a container is asked for: nothing that is wrong with a variable may end a job without one.
    let settings_below = |lookup: &mut dyn ImageLookup| {
        // Before they meet the job's, whose paths are absolute.
        let own = absolute(typed.settings.clone(), lookup)?;
        let own = match &file {
            Some(file) => own.within(file.settings.clone().absolute(&lookup.directory()?)),
            None => own,
        };
        own.check_for_step(|key| format!("--{}", key.spec().option()))?;
        Ok(match &inherited {
            Some(Request::Container(container)) if file.is_none() => {
                let mut outer = container.settings.clone();
                // A container has one image: whoever names another one means another container.
                outer.name = outer.name.filter(|_| typed_image.is_none());
                // The job's own is saved at its end, and none of its steps.
                outer.save = None;
                // That it had to be new, or to run, was said of the job's own.
                if let Some(name) = &mut outer.name {
                    name.mode = NameMode::Auto;
                }
                own.within(outer)
            }
            Some(_) => own,
            None => {
                let below = absolute(variables.settings()?, lookup)?;
                below.check_for_step(Key::variable)?;
                own.or(below)
            }
        })
    };
    match (image, &inherited) {
        (Some(ImageOption::SlurmRuntime), _) => Ok(Some(Request::SlurmRuntime)),
        // In this order: a lookup may fetch the image, and all else is to be good then.
        (Some(ImageOption::Image { option, value }), _) if value != NONE => {
            let settings = settings_below(lookup)?;
            Ok(Some(match lookup.find_image(&option, &value)? {
                Request::Container(Container { image, .. }) => {
                    Request::Container(Container { image, settings })
                }
                other => other,
            }))
        }
        (Some(ImageOption::Image { option, value }), _) => lookup.find_image(&option, &value).map(Some),
        (None, Some(Request::Container(outer))) => {
            let settings = settings_below(lookup)?;
            Ok(Some(Request::Container(Container { image: outer.image.clone(), settings })))
        }
        (None, _) if named => {
            let settings = settings_below(lookup)?;
            Ok(Some(Request::Container(Container { image: ImageSource::Recorded, settings })))
        }
        (None, _) if typed.settings != Settings::default() => {
            let option = typed.first_option.clone().unwrap_or_default();
            Err(Failure::new(format!("{option}: without a container"))
                .hint("give the image with --container=IMAGE"))
        }
        (None, _) => Ok(inherited.clone()),
    }
}

/// What somebody has typed, or set as variables, with whole paths.
fn absolute(mut settings: Settings, lookup: &mut dyn ImageLookup) -> Result<Settings, Failure> {
    if let Some(workdir) = settings.workdir.take() {
        settings.workdir = Some(workdir.absolute(&lookup.directory_inside()?));
    }
    if let Some(mounts) = settings.mounts.take() {
        let inside = lookup.directory_inside()?;
        let placed = mounts.into_iter().map(|mount| mount.at(&inside));
        settings.mounts = Some(placed.collect::<Result<_, _>>()?);
    }
    Ok(settings.absolute(&lookup.directory()?))
}

/// An image whose name is that of an environment file is one.
fn take_file(
    image: Option<ImageOption>,
    environment: Option<EnvironmentOption>,
) -> Result<(Option<ImageOption>, Option<EnvironmentOption>), Failure> {
    match (image, environment) {
        (Some(ImageOption::Image { option, value }), None) if names_environment_file(&value) => {
            Ok((None, Some(EnvironmentOption { option, value })))
        }
        (Some(ImageOption::Image { option, value }), Some(file))
            if value == NONE || names_environment_file(&value) =>
        {
            let [one, other] = [&value, &file.value].map(|value| quote_reference(value));
            let message = format!("{option}={one} and {}={other}: two words for one container", file.option);
            Err(Failure::new(message)
                .hint("give one of them; an image beside an environment file takes the place of the file's"))
        }
        others => Ok(others),
    }
}

/// The image that a file names, which `option` has named.
fn image_of(file: &Environment, option: &str) -> Result<ImageOption, Failure> {
    let Some((place, value)) = file.image.clone() else {
        return Err(Failure::new(format!("{option}: {}: no image", file.file)).hint(
            "write image = \"…\" in it, name a base_environment that does, or give --container-image",
        ));
    };
    Ok(ImageOption::Image { option: format!("{option}: {place}"), value })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Here;

    impl ImageLookup for Here {
        fn find_image(&mut self, option: &str, value: &[u8]) -> Result<Request, Failure> {
            match value {
                b"none" => Ok(Request::Host),
                b"missing" => Err(Failure::new("no such image").about(option)),
                _ => Ok(container(&String::from_utf8_lossy(value), &[])),
            }
        }

        fn read_environment(&mut self, option: &str, value: &[u8]) -> Result<Environment, Failure> {
            let file = String::from_utf8_lossy(value).into_owned();
            if file == "missing" {
                return Err(Failure::new("no such environment file").about(option));
            }
            let image = (file != "bare").then(|| (format!("{file}:1: image"), b"of-file".to_vec()));
            let settings =
                settings(&[(Key::Writable, "yes"), (Key::Mounts, "/f:/f,/g:/g"), (Key::Env, "A=f,F=f")]);
            Ok(Environment { file, image, settings, notes: Vec::new() })
        }

        fn directory(&mut self) -> Result<PathBuf, Failure> {
            Ok("/here".into())
        }
    }

    fn settings(pairs: &[(Key, &str)]) -> Settings {
        let mut settings = Settings::default();
        pairs.iter().for_each(|(key, value)| settings.set(*key, value.as_bytes()).unwrap());
        settings
    }

    fn container(image: &str, pairs: &[(Key, &str)]) -> Request {
        let image = ImageSource::file(PathBuf::from("/images").join(image));
        Request::Container(Container { image, settings: settings(pairs) })
    }

    fn typed(image: Option<&str>, pairs: &[(Key, &str)]) -> TypedOptions {
        let named =
            |value: &str| ImageOption::Image { option: "--container".to_owned(), value: value.into() };
        let first_option = pairs.first().map(|(key, _)| format!("--container-{}", key.name()));
        let settings = settings(pairs);
        TypedOptions { image: image.map(named), settings, first_option, ..TypedOptions::default() }
    }

    fn with_file(file: &str, typed: TypedOptions) -> TypedOptions {
        let environment = EnvironmentOption { option: "--environment".to_owned(), value: file.into() };
        TypedOptions { environment: Some(environment), ..typed }
    }

    fn variables(pairs: &[(&'static str, &'static str)]) -> Variables {
        Variables::of(pairs.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
    }

    #[test]
    fn the_first_that_has_it_wins() {
        let home = [(Key::MountHome, "no")];
        let outer = || Some(container("outer", &[(Key::Writable, "yes"), (Key::MountHome, "yes")]));
        let name = [(Key::Name, "dev")];
        let named = ("MIZZEN_CONTAINER_NAME", "dev");
        let recorded = |pairs: &[(Key, &str)]| {
            Request::Container(Container { image: ImageSource::Recorded, settings: settings(pairs) })
        };
        let image = ("MIZZEN_CONTAINER", "variable");
        let writable = ("MIZZEN_CONTAINER_WRITABLE", "yes");
        for (what, asked, inherited, environment, expected) in [
            ("nothing", typed(None, &[]), None, &[][..], None),
            ("an option", typed(Some("a"), &home), None, &[], Some(container("a", &home))),
            ("a variable", typed(None, &[]), None, &[image], Some(container("variable", &[]))),
            ("an option over a variable", typed(Some("a"), &[]), None, &[image], Some(container("a", &[]))),
            (
                "a variable's setting with an option's image",
                typed(Some("a"), &[]),
                None,
                &[writable],
                Some(container("a", &[(Key::Writable, "yes")])),
            ),
            ("the enclosing job's", typed(None, &[]), outer(), &[image, writable], outer()),
            (
                "an option's setting in the enclosing job's",
                typed(None, &home),
                outer(),
                &[],
                Some(container("outer", &[(Key::Writable, "yes"), (Key::MountHome, "no")])),
            ),
            (
                "another image with the enclosing job's settings",
                typed(Some("a"), &[]),
                outer(),
                &[],
                Some(container("a", &[(Key::Writable, "yes"), (Key::MountHome, "yes")])),
            ),
            ("a name alone", typed(None, &name), None, &[], Some(recorded(&name))),
            ("a name in a variable", typed(None, &[]), None, &[named], Some(recorded(&name))),
            (
                "a name in a job on the host",
                typed(None, &name),
                Some(Request::Host),
                &[],
                Some(recorded(&name)),
            ),
            (
                "a job without a container",
                typed(None, &[]),
                Some(Request::Host),
                &[named],
                Some(Request::Host),
            ),
            (
                "the enclosing job's name",
                typed(None, &[]),
                Some(container("outer", &[(Key::Name, "dev:create")])),
                &[],
                Some(container("outer", &name)),
            ),
            (
                "another image than the name's",
                typed(Some("a"), &[]),
                Some(container("outer", &name)),
                &[],
                Some(container("a", &[])),
            ),
            ("none", typed(Some("none"), &[]), outer(), &[], Some(Request::Host)),
            (
                "the enclosing job's none",
                typed(None, &[]),
                Some(Request::Host),
                &[image],
                Some(Request::Host),
            ),
            (
                "another image in a job on the host",
                typed(Some("a"), &[]),
                Some(Request::Host),
                &[writable],
                Some(container("a", &[])),
            ),
        ] {
            assert_eq!(merge(asked, inherited, &variables(environment), &mut Here), Ok(expected), "{what}");
        }
    }

    #[test]
    fn an_environment_file_is_below_options_and_above_all_else() {
        let outer = || Some(container("outer", &[(Key::Gpu, "none"), (Key::Mounts, "/o:/o")]));
        let file: &[_] = &[(Key::Writable, "yes"), (Key::Mounts, "/f:/f,/g:/g"), (Key::Env, "A=f,F=f")];
        let more: &[_] = &[(Key::Writable, "no"), (Key::Mounts, "/h:/g"), (Key::Env, "A=o")];
        let both: &[_] = &[(Key::Writable, "no"), (Key::Mounts, "/f:/f,/h:/g"), (Key::Env, "F=f,A=o")];
        let variables_of_both = [
            ("MIZZEN_ENVIRONMENT", "v"),
            ("MIZZEN_CONTAINER_GPU", "all"),
            ("MIZZEN_CONTAINER_WRITABLE", "no"),
        ];
        let with_gpu: Vec<_> = file.iter().copied().chain([(Key::Gpu, "all")]).collect();
        for (what, asked, inherited, environment, expected) in [
            ("a file", with_file("f", typed(None, &[])), None, &[][..], container("of-file", file)),
            ("as an image", typed(Some("f.toml"), &[]), None, &[], container("of-file", file)),
            ("with options", with_file("f", typed(None, more)), None, &[], container("of-file", both)),
            ("another image", with_file("f", typed(Some("a"), &[])), None, &[], container("a", file)),
            (
                "no image of its own",
                with_file("bare", typed(Some("a"), &[])),
                None,
                &[],
                container("a", file),
            ),
            ("in a job", with_file("f", typed(None, &[])), outer(), &[], container("of-file", file)),
            ("a variable", typed(None, &[]), None, &variables_of_both, container("of-file", &with_gpu)),
            (
                "an option's image over a variable's file",
                typed(Some("a"), &[]),
                None,
                &[("MIZZEN_EDF", "v")],
                container("a", &[]),
            ),
        ] {
            let merged = merge(asked, inherited, &variables(environment), &mut Here);
            assert_eq!(merged, Ok(Some(expected)), "{what}");
        }
        for (asked, message) in [
            (with_file("missing", typed(None, &[])), "--environment: no such environment file"),
            (with_file("bare", typed(None, &[])), "--environment: bare: no image"),
            (
                with_file("f", typed(Some("none"), &[])),
                "--container=none and --environment=f: two words for one container",
            ),
            (
                with_file("f", typed(Some("g.toml"), &[])),
                "--container=g.toml and --environment=f: two words for one container",
            ),
        ] {
            let failure = merge(asked, None, &Variables::NONE, &mut Here).unwrap_err();
            assert_eq!(failure.message, message);
        }
        let join = TypedOptions { join: Some(b"0".to_vec()), ..with_file("f", typed(None, &[])) };
        let failure = merge(join, None, &Variables::NONE, &mut Here).unwrap_err();
        assert_eq!(failure.message, "--container-join and other options of a container");
    }

    #[test]
    fn relative_paths_begin_where_the_command_was_typed() {
        let merged = merge(typed(Some("a"), &[(Key::Workdir, "w")]), None, &Variables::NONE, &mut Here);
        assert_eq!(merged, Ok(Some(container("a", &[(Key::Workdir, "/here/w")]))));
    }

    #[test]
    fn a_join_takes_the_container_as_it_is() {
        let join = |asked: TypedOptions| {
            merge(TypedOptions { join: Some(b"0".to_vec()), ..asked }, None, &Variables::NONE, &mut Here)
        };
        assert_eq!(join(typed(None, &[])), Ok(Some(Request::Join("0".to_owned()))));
        let message = "--container-join and other options of a container";
        assert_eq!(join(typed(Some("a"), &[])).unwrap_err().message, message);
        assert_eq!(join(typed(None, &[(Key::MountHome, "no")])).unwrap_err().message, message);
    }

    #[test]
    fn what_is_wrong_counts_only_where_there_is_a_container() {
        let bad = [("MIZZEN_CONTAINER_WRITABLE", "x")];
        assert_eq!(merge(typed(None, &[]), None, &variables(&bad), &mut Here), Ok(None));
        let failure = merge(typed(Some("a"), &[]), None, &variables(&bad), &mut Here).unwrap_err();
        assert_eq!(failure.message, "MIZZEN_CONTAINER_WRITABLE: \"x\" is not a size");
        let pid = merge(typed(Some("a"), &[(Key::Unshare, "pid")]), None, &Variables::NONE, &mut Here);
        let message =
            "--container-unshare: pid is not for the tasks of a step: Slurm knows them by their process ids";
        assert_eq!(pid.unwrap_err().message, message);
        let alone = merge(typed(None, &[(Key::MountHome, "no")]), None, &Variables::NONE, &mut Here);
        assert_eq!(alone.unwrap_err().message, "--container-mount-home: without a container");
        let missing = merge(typed(Some("missing"), &[]), None, &Variables::NONE, &mut Here);
        assert_eq!(missing.unwrap_err().message, "--container: no such image");
    }
}
