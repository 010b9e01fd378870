//! srun, sbatch and salloc, as the user: turn the options into one request before anything is submitted.
//!
//! Each setting by itself comes from the first of these that has it: an option, the container that the enclosing
//! job hands down, a variable MIZZEN_CONTAINER_…; mizzen.toml is left to the node.

use std::env::var_os;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use mizzen_core::failure::quote;
use mizzen_core::request::{self, Container, VARIABLE};
use mizzen_core::settings::Key;
use mizzen_core::staging::BROADCAST_VARIABLE;
use mizzen_core::{Config, Failure, Request, Settings};

use crate::options::Meaning;
use crate::spank::{self, Spank};
use crate::state::Reported;
use crate::{multi_prog, oci, options, state};

/// Slurm's `--container` ends here. Slurm sets it only when unset, so what stays in the environment would hide
/// the option of a nested srun.
pub const SLURM_CONTAINER: &str = "SLURM_CONTAINER";
/// Stands for `--container` where no option and no enclosing job says otherwise.
const IMAGE_VARIABLE: &str = "MIZZEN_CONTAINER";

/// Registers the options, without the values that an enclosing job was given: those would come back as if typed
/// here, and a relative image would be looked for in another directory. What a job hands down is in the request.
pub fn register_options(spank: &Spank) -> Result<(), Failure> {
    for spec in &options::ALL {
        spank::unset_variable(&options::inherited_variable(spec));
    }
    // Of another step.
    spank::unset_variable(BROADCAST_VARIABLE);
    options::register(spank)
}

/// Whether any component of the job has asked for a container so far.
pub fn container_wanted() -> bool {
    let variables = [VARIABLE, IMAGE_VARIABLE];
    state::lock().wanted
        || slurms_own_option().is_some()
        || variables.iter().any(|name| var_os(name).is_some())
}

/// Puts the request into the variable that goes to the node, or refuses the command. Slurm calls this once for
/// each component of a heterogeneous job. The components share one environment and so one request: those that
/// ask for different containers are refused.
pub fn make_request() -> Result<(), Failure> {
    let (failure, mut reported, first, inherited) = {
        let mut state = state::lock();
        if state.components == 0 {
            state.inherited = var_os(VARIABLE).map(OsStringExt::into_vec);
        }
        state.components += 1;
        let reported = std::mem::take(&mut state.options);
        (state.failure.clone(), reported, state.components == 1, state.inherited.clone())
    };
    if let Some(failure) = failure {
        return Err(failure);
    }
    if !first {
        take_repetitions_out(&mut reported)?;
    }
    let inherited = inherited.as_deref().map(Request::decode).transpose()?;
    let request = component_request(&reported, inherited)?;
    if let Some(Request::Container(_) | Request::Join(_)) = &request {
        multi_prog::refuse_in_client()?;
    }
    if !first {
        let shared = state::lock().request.clone();
        return if shared == request {
            Ok(())
        } else {
            Err(different_containers(&show(&shared), &show(&request)))
        };
    }
    if let Some(request) = &request {
        let text = request.encode();
        if text.len() > request::LIMIT {
            let message = format!("the container's options have {} bytes together", text.len());
            return Err(Failure::new(message)
                .hint("64 KiB is the limit; mount a directory above, not each file in it"));
        }
        spank::set_variable(VARIABLE, &text);
    }
    state::lock().request = request;
    Ok(())
}

/// After the own options of a later component sbatch reports the first component's once more, as if they were the
/// later ones on the command line.
fn take_repetitions_out(reported: &mut Vec<Reported>) -> Result<(), Failure> {
    let mut kept: Vec<Reported> = Vec::new();
    for option in reported.drain(..).filter(|option| option.meaning().is_some()) {
        let list =
            matches!(option.meaning(), Some(Meaning::Setting(Key::Mounts | Key::Env | Key::Device, _)));
        let same_kind = |other: &&Reported| same_kind(other.meaning(), option.meaning());
        match kept.iter().find(same_kind) {
            Some(other) if !list && (other.value() != option.value()) => {
                return Err(different_containers(&quote(&other.value()), &quote(&option.value())));
            }
            _ if !kept.contains(&option) => kept.push(option),
            _ => {}
        }
    }
    *reported = kept;
    Ok(())
}

fn same_kind(one: Option<Meaning>, other: Option<Meaning>) -> bool {
    match (one, other) {
        (Some(Meaning::Setting(one, _)), Some(Meaning::Setting(other, _))) => one == other,
        _ => one == other,
    }
}

/// What this component asks for.
fn component_request(reported: &[Reported], inherited: Option<Request>) -> Result<Option<Request>, Failure> {
    if let Some(missing) = reported.iter().find(|option| option.meaning() == Some(Meaning::Missing)) {
        return Err(Failure::new(format!("{}: mizzen has no named containers", missing.name())).hint(
            "give the image with --container; --container-join enters the container of a running step",
        ));
    }
    let typed = typed_settings(reported)?;
    let last = |meaning| reported.iter().rfind(|option| option.meaning() == Some(meaning));
    if let Some(join) = last(Meaning::Join) {
        if last(Meaning::Image).is_some() || slurms_own_option().is_some() || typed != Settings::default() {
            return Err(Failure::new("--container-join and other options of a container")
                .hint("the container of the other step is taken as it is"));
        }
        return Request::from_join(&join.value).map(Some).map_err(|failure| failure.about(join.name()));
    }
    let ours = last(Meaning::Image).map(|option| (option.name(), option.value.clone()));
    let lower = match &inherited {
        Some(Request::Container(container)) => container.settings.clone(),
        Some(_) => Settings::default(),
        None => settings_of_variables()?,
    };
    let directory = std::env::current_dir()
        .map_err(|error| Failure::new(format!("cannot find the current directory: {error}")))?;
    let settings = typed.clone().or(lower).absolute(&directory);
    let Some(named) = named_image(ours, inherited.is_none())? else {
        return match inherited {
            Some(Request::Container(Container { image, digest, .. })) => {
                Ok(Some(Request::Container(Container { image, digest, settings })))
            }
            _ if typed != Settings::default() => {
                let option = reported.first().map(Reported::name).unwrap_or_default();
                Err(Failure::new(format!("{option}: without a container"))
                    .hint("give the image with --container=IMAGE"))
            }
            inherited => Ok(inherited),
        };
    };
    let request = match named {
        Named::SlurmRuntime => Request::SlurmRuntime,
        Named::Image { option, value } => image_request(&option, &value, &directory)?,
    };
    Ok(Some(match request {
        Request::Container(Container { image, digest, .. }) => {
            Request::Container(Container { image, digest, settings })
        }
        other => other,
    }))
}

fn image_request(option: &str, value: &[u8], directory: &Path) -> Result<Request, Failure> {
    let config = Config::load(&state::lock().config_source()?)?;
    let request = Request::from_option(option, value, directory, &config)?;
    spank::unset_variable(SLURM_CONTAINER);
    oci::spare_pmix()?;
    Ok(request)
}

/// What names the image.
enum Named {
    Image { option: String, value: Vec<u8> },
    SlurmRuntime,
}

/// The image that an option names, or, in the outermost command, the variable.
fn named_image(ours: Option<(String, Vec<u8>)>, outermost: bool) -> Result<Option<Named>, Failure> {
    match (slurms_own_option(), ours) {
        (Some(slurms), Some((_, ours))) if slurms != ours => {
            let message = format!("--container={} and --container-image={}", quote(&slurms), quote(&ours));
            Err(Failure::new(format!("{message}: two images for one container"))
                .hint("give one of them; the variable SLURM_CONTAINER counts as --container"))
        }
        (Some(_), _) if oci::slurm_runs_containers() => {
            spank::inform(
                "--container is run by Slurm itself here (oci.conf); --container-image is mizzen's",
            );
            Ok(Some(Named::SlurmRuntime))
        }
        (Some(value), _) => Ok(Some(Named::Image { option: "--container".to_owned(), value })),
        (None, Some((option, value))) => Ok(Some(Named::Image { option, value })),
        (None, None) => Ok(var_os(IMAGE_VARIABLE)
            .filter(|_| outermost)
            .map(|value| Named::Image { option: IMAGE_VARIABLE.to_owned(), value: value.into_vec() })),
    }
}

fn typed_settings(reported: &[Reported]) -> Result<Settings, Failure> {
    let mut settings = Settings::default();
    for option in reported {
        if let Some(Meaning::Setting(key, _)) = option.meaning() {
            settings.set(key, &option.value()).map_err(|failure| failure.about(option.name()))?;
        }
    }
    Ok(settings)
}

fn settings_of_variables() -> Result<Settings, Failure> {
    let mut settings = Settings::default();
    for key in Key::ALL {
        let name = key.variable();
        if let Some(value) = var_os(&name).filter(|value| !value.is_empty()) {
            settings.set(key, value.as_bytes()).map_err(|failure| failure.about(name))?;
        }
    }
    Ok(settings)
}

fn different_containers(one: &str, other: &str) -> Failure {
    let message =
        format!("the components of a heterogeneous job ask for different containers: {one} and {other}");
    Failure::new(message).hint("give every component the same --container, or run them as separate steps")
}

fn show(request: &Option<Request>) -> String {
    match request {
        Some(Request::Container(container))
            if container.settings == Settings::default() && container.digest.is_none() =>
        {
            quote(container.image.as_os_str().as_bytes())
        }
        Some(Request::SlurmRuntime) => "Slurm's own runtime".to_owned(),
        Some(request @ (Request::Container(_) | Request::Join(_))) => request.encode(),
        Some(Request::Host) | None => "none".to_owned(),
    }
}

/// The value of Slurm's own `--container`. Its variable is the older way to learn it: Slurm leaves a value that was
/// there before.
fn slurms_own_option() -> Option<Vec<u8>> {
    if !options::slurm_has_container() {
        return None;
    }
    spank::own_option(c"container").or_else(|| var_os(SLURM_CONTAINER).map(OsStringExt::into_vec))
}
