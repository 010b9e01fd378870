//! srun, sbatch and salloc, as the user: turn the options into one request before anything is submitted. Which of them wins is
//! in `core/src/precedence.rs`.

use std::env::{var_os, vars_os};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use mizzen_core::config::Compatible;
use mizzen_core::environment::Environment;
use mizzen_core::failure::{quote, quote_reference};
use mizzen_core::find_image::{BareNames, ImageFinder};
use mizzen_core::precedence::{self, EnvironmentOption, ImageLookup, ImageOption, TypedOptions};
use mizzen_core::request::{self, ImageSource, SUBMITTED, SUBMITTED_VARIABLE, UNASKED, VARIABLE, WANTED};
use mizzen_core::settings::TomlForm;
use mizzen_core::staging::BROADCAST_VARIABLE;
use mizzen_core::{Failure, Request, Settings, SlurmConf, Variables};

use crate::import::ClientImporter;
use crate::options::Meaning;
use crate::spank::{self, Spank};
use crate::state::GivenOption;
use crate::{components, environment, multi_prog, oci, options, state};

/// Slurm's `--container` ends here. Slurm sets it only when unset, so what stays in the environment would hide
/// the option of a nested srun.
pub const SLURM_CONTAINER: &str = "SLURM_CONTAINER";

/// Registers the options, without the values that an enclosing job was given: those would come back as if typed
/// here, and a relative image would be looked for in another directory. What a job hands down is in the request.
pub fn register_options(spank: &Spank) -> Result<(), Failure> {
    for spec in options::ALL.iter() {
        spank::unset_variable(&options::inherited_variable(spec));
    }
    // Of another step or job.
    for name in [BROADCAST_VARIABLE, SUBMITTED_VARIABLE, multi_prog::CHECKED_VARIABLE] {
        spank::unset_variable(name);
    }
    state::lock().slurm_container = var_os(SLURM_CONTAINER).map(OsStringExt::into_vec);
    options::register(spank)
}

/// Whether any component of the job has asked for a container so far.
pub fn container_wanted() -> bool {
    let asks = |text: &[u8]| text != UNASKED.as_bytes();
    let known = {
        let state = state::lock();
        state.wanted || state.inherited.as_deref().is_some_and(asks) || !state.inherited_groups.is_empty()
    };
    known
        || slurms_own_option().is_some()
        || var_os(VARIABLE).is_some_and(|text| asks(text.as_bytes()))
        || !components::handed_down().is_empty()
        || own_variables().ask_for_container()
}

/// Puts the request into what goes to the node, or refuses the command. Slurm calls this once for each component of a
/// heterogeneous job; how each can have a request of its own is in `components.rs`.
pub fn make_request(spank: &Spank) -> Result<(), Failure> {
    let (failure, mut reported, component, inherited, groups, variables) = {
        let mut state = state::lock();
        if state.components == 0 {
            // After a component with --export-file sbatch has no environment left.
            state.inherited = var_os(VARIABLE).map(OsStringExt::into_vec);
            state.inherited_groups = components::handed_down();
            state.variables = own_variables();
        }
        let component = state.components;
        state.components += 1;
        let reported = std::mem::take(&mut state.options);
        (
            state.failure.clone(),
            reported,
            component,
            state.inherited.clone(),
            state.inherited_groups.clone(),
            state.variables.clone(),
        )
    };
    // Whatever is wrong with mizzen, a job that wants no container goes on.
    if let Some(failure) = failure.filter(|_| container_wanted()) {
        return Err(failure);
    }
    options::refuse_taken()?;
    match (component, spank::is_srun(), spank::is_salloc()) {
        (0, ..) | (_, true, _) => {}
        (_, _, true) => components::take_handed_on_out(&mut reported),
        _ => take_repetitions_out(&mut reported)?,
    }
    let inherited = components::inherited(inherited.as_deref(), &groups)?;
    let request = component_request(&reported, inherited, &variables)?;
    if let Some(Request::Container(_) | Request::Join(_)) = &request {
        check_command()?;
    }
    if let Some(Request::Container(container)) = &request {
        refuse_save_of_nothing(&container.settings)?;
    }
    if !matches!(request, Some(Request::SlurmRuntime)) {
        components::keep_container_option_apart()?;
    }
    if component == 0 {
        if !spank::is_srun() {
            components::forget(&groups);
        }
        state::lock().request.clone_from(&request);
        let apart =
            components::needs_one_request_each(container_wanted()) && components::export(request.as_ref());
        return send(spank, request.as_ref(), !apart);
    }
    let first = state::lock().request.clone();
    if state::lock().exported.is_some() && components::export(request.as_ref()) {
        return send(spank, request.as_ref(), false);
    }
    if first == request {
        return send(spank, request.as_ref(), true);
    }
    if spank::is_salloc() {
        components::set_for_group(component, first.as_ref(), request.as_ref());
        return send(spank, request.as_ref(), false);
    }
    Err(different_containers(&show(&first), &show(&request)))
}

/// Puts the request into what goes to the node, the environment that all components have among it or not.
fn send(spank: &Spank, request: Option<&Request>, in_environment: bool) -> Result<(), Failure> {
    let Some(request) = request else { return Ok(()) };
    let text = request.encode();
    if text.len() > request::LIMIT {
        let message = format!("the container's options have {} bytes together", text.len());
        return Err(
            Failure::new(message).hint("64 KiB is the limit; mount a directory above, not each file in it")
        );
    }
    if in_environment {
        spank::set_variable(VARIABLE, &text);
    }
    let wanted = matches!(request, Request::Container(_) | Request::Join(_));
    spank.set_job_control_variable(WANTED, if wanted { "yes" } else { "no" })?;
    if spank::own_option(c"export-file").is_some() {
        spank.set_job_control_variable(SUBMITTED, &text)?;
    }
    Ok(())
}

/// Refuses what this command cannot do with a container.
pub fn check_command() -> Result<(), Failure> {
    multi_prog::check_in_client()?;
    refuse_without_shell()?;
    refuse_exported_requests()
}

/// salloc itself runs nothing in a container, unless its shell is a step on the node; and its steps are saved by their own option.
fn refuse_save_of_nothing(settings: &Settings) -> Result<(), Failure> {
    if settings.save.is_none() || !spank::is_salloc() {
        return Ok(());
    }
    let conf = SlurmConf::read(var_os("SLURM_CONF").map(PathBuf::from).as_deref());
    let on_node = |conf: &SlurmConf| {
        conf.value("LaunchParameters").is_some_and(|value| value.contains("use_interactive_step"))
    };
    match conf {
        Some(conf) if !conf.is_incomplete() && !on_node(&conf) => {
            Err(Failure::new("--container-save: salloc itself runs nothing in the container")
                .hint("give it to srun, for the step whose container is to be saved"))
        }
        _ => Ok(()),
    }
}

/// Without a shell or command of salloc's nobody inherits the container: `srun --jobid` comes from elsewhere.
fn refuse_without_shell() -> Result<(), Failure> {
    if spank::own_option(c"no-shell").is_none_or(|value| value != b"set") {
        return Ok(());
    }
    Err(Failure::new("--no-shell: nothing would hand the container on to the steps of this allocation").hint(
        "give the image to every `srun --jobid`, and --container-image=none to salloc if it inherits one",
    ))
}

/// `--export=ALL,SLURM_CONTAINER=none` would set on the node what contradicts the option.
fn refuse_exported_requests() -> Result<(), Failure> {
    let mut list = components::typed_export().unwrap_or_default();
    // Slurm takes quotes away.
    list.retain(|byte| !b"'\"\\".contains(byte));
    let is_ours = |item: &&[u8]| {
        let names = [b"SLURM_CONTAINER=".as_slice(), b"SLURM_MIZZEN_", b"SLURM_SPANK_MIZZEN_"];
        names.iter().any(|name| item.starts_with(name))
    };
    match list.split(|byte| *byte == b',' || byte.is_ascii_whitespace()).find(is_ours) {
        Some(item) => {
            Err(Failure::new(format!("--export: \"{}\" beside a container that is asked for", quote(item)))
                .hint("--container=none runs on the node; leave the variable out of --export"))
        }
        None => Ok(()),
    }
}

fn own_variables() -> Variables {
    let all: Vec<(Vec<u8>, Vec<u8>)> =
        vars_os().map(|(name, value)| (name.into_vec(), value.into_vec())).collect();
    Variables::of(all.iter().map(|(name, value)| (name.as_slice(), value.as_slice())))
}

/// After the own options of a later component sbatch reports the first component's once more, as if they were the
/// later ones on the command line.
fn take_repetitions_out(reported: &mut Vec<GivenOption>) -> Result<(), Failure> {
    let mut kept: Vec<GivenOption> = Vec::new();
    for option in reported.drain(..).filter(|option| option.meaning().is_some()) {
        let list =
            matches!(option.meaning(), Some(Meaning::Setting(key, _)) if key.toml_form() == TomlForm::List);
        let same_kind = |other: &&GivenOption| same_kind(other.meaning(), option.meaning());
        match kept.iter().find(same_kind) {
            Some(other) if !list && (other.value() != option.value()) => {
                let shown = |option: &GivenOption| quote_reference(&option.value());
                return Err(different_containers(&shown(other), &shown(&option)));
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
fn component_request(
    reported: &[GivenOption],
    inherited: Option<Request>,
    variables: &Variables,
) -> Result<Option<Request>, Failure> {
    let last = |meaning| reported.iter().rfind(|option| option.meaning() == Some(meaning));
    let typed = TypedOptions {
        image: named_image(last(Meaning::Image))?,
        environment: last(Meaning::Environment)
            .map(|given| EnvironmentOption { option: given.name(), value: given.value.clone() }),
        join: last(Meaning::Join).map(|option| option.value.clone()),
        settings: options::settings(reported)?,
        first_option: reported.first().map(GivenOption::name),
    };
    precedence::merge(typed, inherited, variables, &mut Client)
}

/// What only this program knows.
struct Client;

impl ImageLookup for Client {
    fn find_image(&mut self, option: &str, value: &[u8]) -> Result<Request, Failure> {
        let config = state::lock().config()?;
        let mut finder = ImageFinder {
            directory: &self.directory()?,
            config: &config,
            policy: &config.policy,
            bare_names: BareNames::of_jobs(&config),
            import: config.import,
            importer: &mut ClientImporter { image_store: &config.image_store },
        };
        let request = Request::from_option(option, value, &mut finder)?;
        spank::unset_variable(SLURM_CONTAINER);
        oci::hide_container_option_from_pmix()?;
        Ok(request)
    }

    fn read_environment(&mut self, option: &str, value: &[u8]) -> Result<Environment, Failure> {
        environment::read_once(value).map_err(|failure| failure.about(option))
    }

    fn directory(&mut self) -> Result<PathBuf, Failure> {
        std::env::current_dir()
            .map_err(|error| Failure::caused_by("cannot find the current directory", error))
    }

    fn directory_inside(&mut self) -> Result<PathBuf, Failure> {
        let compatible = state::lock().config()?.compatible;
        // pyxis looks for them when it has entered the container, at whose root it is then.
        if compatible == Compatible::Pyxis { Ok("/".into()) } else { self.directory() }
    }
}

/// The image that an option names: Slurm's own, or ours.
fn named_image(ours: Option<&GivenOption>) -> Result<Option<ImageOption>, Failure> {
    match (slurms_own_option(), ours) {
        (Some(slurms), Some(ours)) if slurms != ours.value => {
            let (one, other) = (quote_reference(&slurms), quote_reference(&ours.value));
            let message = format!("--container={one} and --container-image={other}");
            Err(Failure::new(format!("{message}: two images for one container"))
                .hint("give one of them; the variable SLURM_CONTAINER counts as --container"))
        }
        (Some(_), _) if oci::slurm_runs_containers() => {
            spank::log_info(
                "--container is run by Slurm itself here (oci.conf); --container-image is mizzen's",
            );
            Ok(Some(ImageOption::SlurmRuntime))
        }
        (Some(value), _) => Ok(Some(ImageOption::Image { option: "--container".to_owned(), value })),
        (None, Some(ours)) => Ok(Some(ImageOption::Image { option: ours.name(), value: ours.value.clone() })),
        (None, None) => Ok(None),
    }
}

fn different_containers(one: &str, other: &str) -> Failure {
    let message =
        format!("the components of a heterogeneous job ask for different containers: {one} and {other}");
    Failure::new(message).hint(
        "sbatch cannot hand them on; give them to srun in the script: `srun --het-group=0 --container=A … : --het-group=1 --container=B …`",
    )
}

fn show(request: &Option<Request>) -> String {
    match request {
        Some(Request::Container(container)) if container.settings == Settings::default() => {
            match &container.image {
                ImageSource::File { path, digest: None } => quote(path.as_os_str().as_bytes()),
                ImageSource::File { digest: Some(_), .. } => {
                    request.as_ref().map_or_else(String::new, Request::encode)
                }
                ImageSource::Stored { reference, .. } | ImageSource::Unfetched(reference) => {
                    reference.to_string()
                }
                ImageSource::Recorded => "none".to_owned(),
            }
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
    spank::own_option(c"container")
        .or_else(|| var_os(SLURM_CONTAINER).map(OsStringExt::into_vec))
        .or_else(|| state::lock().slurm_container.clone())
}
