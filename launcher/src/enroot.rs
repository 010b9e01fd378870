//! `enroot`: the words of that command, for scripts that have them, translated into what mizzen does. A link of this name to the
//! launcher is all of it. Its containers are named ones that no job takes with it. What has no counterpart is refused.
//! Runs as the user on the host.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use mizzen_core::config::Compatible;
use mizzen_core::failure::{quote, quote_reference};
use mizzen_core::options::{EnvOption, MountOption, parse_env, parse_mount};
use mizzen_core::request::ImageSource;
use mizzen_core::settings::{ContainerName, NameMode, Value, Writable};
use mizzen_core::{Config, Failure, Settings, build, fs_server};

use crate::cli::enroot::{Enroot, EnrootCommand};
use crate::containers::{commands::Containers, container_process};
use crate::dispatch::{ended, ran, start, told_by_clap};
use crate::host::Host;
use crate::image::shown;
use crate::options::{Origin, RunOptions, Scope};
use crate::plan::{Explained, Program};
use crate::report::{print, report, report_note};
use crate::sandbox::{SaveTarget, exec_program};
use crate::step::join::open_process;
use crate::{find_image, importer, pipeline};

/// The name that the launcher is called by.
pub const NAME: &str = "enroot";

/// Does what these words say.
pub fn run(words: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Vec<OsString> = std::iter::once(NAME.into()).chain(words).collect();
    let runs = words.get(1).is_some_and(|word| word == "start" || word == "exec");
    let command = match Enroot::try_parse_from(words) {
        Ok(parsed) => parsed.command,
        Err(error) => return told_by_clap(&error, runs),
    };
    note_variables();
    let loaded = Config::of_this_machine();
    let config = match loaded {
        Ok(config) => config,
        Err(failure) if runs => return ran(Err(failure)),
        Err(failure) => return ended(Err(failure)),
    };
    match command {
        EnrootCommand::Import { output, arch, uri } => ended(Err(import(output, arch, &uri))),
        EnrootCommand::Create { name, force, image } => ended(create(name, force, &image, config)),
        EnrootCommand::Start { conf: Some(_), .. } => ran(Err(refused(
            "start --conf",
            "write its mounts and variables as -m and -e, or as an environment file for `mizzen run`",
        ))),
        EnrootCommand::Start { rc: Some(_), .. } => {
            ran(Err(refused("start --rc", "give the script as the program: enroot start NAME sh SCRIPT")))
        }
        EnrootCommand::Start { rw, root, mounts, env, container, command, .. } => {
            let settings = parse_settings(&mounts, &env, rw, root);
            ran(settings.and_then(|settings| start(find(&container, command, settings, config)?)))
        }
        EnrootCommand::Exec { env, pid, command } => ran(Err(exec(&env, pid, command))),
        EnrootCommand::List { fancy } => ended(list(fancy, &config).and_then(|text| print(&text))),
        EnrootCommand::Export { output, force, name } => ended(export(output, force, &name, config)),
        EnrootCommand::Remove { force, names } => remove(force, &names, &config),
        EnrootCommand::Version => ended(print(&format!("{}\n", build::NAME))),
        EnrootCommand::Other(words) => {
            let word = words.first().cloned().unwrap_or_default();
            ended(Err(refused(&quote(word.as_bytes()), "`enroot --help` shows what there is")))
        }
    }
}

fn refused(words: &str, hint: &str) -> Failure {
    Failure::new(format!("enroot {words}: mizzen has nothing like it")).hint(hint)
}

/// Enroot's variables that hold here too. The importer reads the first.
const CONFIG_PATH: &str = "ENROOT_CONFIG_PATH";
const MOUNT_HOME: &str = "ENROOT_MOUNT_HOME";
const REMAP_ROOT: &str = "ENROOT_REMAP_ROOT";
const WRITABLE: &str = "ENROOT_ROOTFS_WRITABLE";

/// What somebody has set means something to them. Most of these say where enroot keeps its files, and are in many profiles.
fn note_variables() {
    let known =
        |name: &OsStr| [CONFIG_PATH, MOUNT_HOME, REMAP_ROOT, WRITABLE].iter().any(|known| name == *known);
    let others = std::env::vars_os()
        .filter(|(name, value)| name.as_bytes().starts_with(b"ENROOT_") && !known(name) && !value.is_empty());
    for (name, _) in others {
        let name = quote(name.as_bytes());
        report_note(&format!("{name} has no effect; mizzen.toml says where containers and images are kept"));
    }
}

fn is_set(name: &str) -> Result<bool, Failure> {
    let value = std::env::var_os(name).unwrap_or_default();
    match value.as_bytes() {
        b"" | b"n" => Ok(false),
        b"y" => Ok(true),
        value => bool::parse(value).map_err(|failure| failure.about(name).hint("write yes or no")),
    }
}

/// Becomes the importer; or why not.
fn import(output: Option<PathBuf>, arch: Option<String>, uri: &str) -> Failure {
    let text = quote_reference(uri.as_bytes());
    let image = match uri.split_once("://") {
        Some(("docker", image)) => image,
        Some((daemon @ ("dockerd" | "podman"), image)) => {
            let program = if daemon == "podman" { daemon } else { "docker" };
            return Failure::new(format!("{text}: images of a daemon are not taken from it"))
                .hint(format!("{program} save {} | mizzen import -o FILE -", quote(image.as_bytes())));
        }
        _ => {
            return Failure::new(format!("{text}: not docker://[USER@][REGISTRY#]IMAGE[:TAG]"))
                .hint("`mizzen import --help` shows what else can be imported");
        }
    };
    let output = output.unwrap_or_else(|| file_name(image).into());
    let mut words: Vec<OsString> = vec!["import".into(), "--output".into(), output.into()];
    if let Some(arch) = arch {
        let arch = match arch.as_str() {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            arch => arch,
        };
        words.extend(["--platform".into(), format!("linux/{arch}").into()]);
    }
    words.extend(["--".into(), uri.into()]);
    importer::exec_with(words.into_iter())
}

/// The file that enroot would write: of `USER@nvcr.io#nvidia/cuda:12`, `nvidia+cuda+12.sqsh`.
fn file_name(image: &str) -> String {
    let image = image.rsplit_once(['#', '@']).map_or(image, |(_, name)| name);
    image.replace(['/', ':'], "+") + ".sqsh"
}

fn parse_name(name: &str, mode: NameMode) -> Result<ContainerName, Failure> {
    if name.contains(':') {
        let message = format!("\"{}\": the name has a colon", quote(name.as_bytes()));
        return Err(Failure::new(message).hint("a name is letters, digits, - and _, as train or pytorch-2"));
    }
    Ok(ContainerName { mode, ..ContainerName::parse(name.as_bytes())? })
}

/// What enroot gives a container: neither the home directory nor the current one, and the image's entrypoint.
fn options(
    name: Option<ContainerName>,
    image: ImageSource,
    command: Vec<OsString>,
    settings: Settings,
    config: Config,
) -> Result<RunOptions, Failure> {
    let settings =
        Settings { name, mount_home: Some(is_set(MOUNT_HOME)?), entrypoint: Some(true), ..settings };
    let mut options = RunOptions::new(image, command, settings, config, Origin::Option)?;
    options.compatible = Compatible::Pyxis;
    if let Some(named) = &mut options.named {
        named.scope = Scope::Global;
    }
    Ok(options)
}

/// What pyxis has in front of the names of a step's containers, when it gives them to enroot: `pyxis_dev`, or `pyxis_JOB_dev` of a
/// container that goes with the job.
const OF_STEP: &str = "pyxis_";

/// The container that a script means by this name, if it is there: it may have it from `--container-name`, or from a list.
fn named(name: &str, config: &Config) -> Result<Option<(Containers, String)>, Failure> {
    let short = name.strip_prefix(OF_STEP);
    let of_job = short
        .and_then(|short| short.split_once('_'))
        .and_then(|(job, name)| job.parse().ok().map(|job| (Scope::Job(job), name)));
    let meant = [Some((Scope::Global, name)), of_job, short.map(|short| (Scope::Global, short))];
    for (scope, name) in meant.into_iter().flatten() {
        let containers = Containers::of(config, scope);
        if containers.has(name)? {
            return Ok(Some((containers, name.to_owned())));
        }
    }
    Ok(None)
}

/// How enroot would list it.
fn listed(containers: &Containers, name: &str) -> Result<String, Failure> {
    Ok(match containers.scope() {
        Scope::Job(job) => format!("{OF_STEP}{job}_{name}"),
        Scope::Global if containers.is_of_step(name)? => format!("{OF_STEP}{name}"),
        Scope::Global => name.to_owned(),
    })
}

fn create(name: Option<String>, force: bool, image: &Path, config: Config) -> Result<(), Failure> {
    let of_file = || image.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = parse_name(&name.or_else(of_file).unwrap_or_default(), NameMode::Create)?;
    let (text, containers) = (name.name.clone(), Containers::global(&config));
    let source = find_image::to_run(image, &config)?;
    let options = options(Some(name), source, Vec::new(), Settings::default(), config)?;
    pipeline::create(options, || match (containers.has(&text)?, force) {
        (true, true) => remove_one(&containers, &text),
        (true, false) => Err(Failure::new(format!("the container \"{text}\" exists"))
            .hint(format!("enroot remove -f {text}, or enroot create --force"))),
        (false, _) => Ok(()),
    })
}

fn parse_settings(mounts: &[OsString], env: &[OsString], rw: bool, root: bool) -> Result<Settings, Failure> {
    let mounts = mounts.iter().map(|text| parse_enroot_mount(text)).collect::<Result<_, _>>()?;
    Ok(Settings {
        mounts: Some(mounts),
        environment: Some(parse_variables(env)?),
        writable: Some(if rw || is_set(WRITABLE)? { Writable::Yes } else { Writable::No }),
        remap_root: Some(root || is_set(REMAP_ROOT)?),
        ..Settings::default()
    })
}

fn parse_variables(env: &[OsString]) -> Result<Vec<EnvOption>, Failure> {
    env.iter().map(|text| parse_env(text).map_err(|failure| failure.about("--env"))).collect()
}

/// `SRC:DST:ro,nosuid`, where mizzen joins flags by `+`.
fn parse_enroot_mount(text: &OsStr) -> Result<MountOption, Failure> {
    let mut text = text.as_bytes().to_vec();
    let colon =
        |text: &[u8], from: usize| text[from..].iter().position(|byte| *byte == b':').map(|at| from + at);
    if colon(&text, 0).is_none() && text.iter().any(u8::is_ascii_whitespace) {
        return Err(Failure::new(format!("--mount: \"{}\": lines of fstab are not read", quote(&text)))
            .hint("write SRC:DST[:FLAG,...]; tmpfs:DST is an empty tmpfs"));
    }
    if let Some(flags) = colon(&text, 0).and_then(|first| colon(&text, first + 1)) {
        text[flags..].iter_mut().filter(|byte| **byte == b',').for_each(|byte| *byte = b'+');
    }
    parse_mount(&text).map_err(|failure| failure.about("--mount"))
}

/// The user's container of that name, or else a file. Not the other way round: in a directory that others write to, a file of that
/// name may be theirs.
fn find(
    container: &str,
    command: Vec<OsString>,
    settings: Settings,
    config: Config,
) -> Result<RunOptions, Failure> {
    let path = Path::new(container);
    let is_file =
        || fs_server::reach(path).and_then(|found| found.metadata()).is_ok_and(|found| found.is_file());
    if named(container, &config)?.is_none() && is_file() {
        let image = find_image::to_run(path, &config)?;
        return options(None, image, command, settings, config);
    }
    of_existing(container, command, settings, config)
}

fn of_existing(
    name: &str,
    command: Vec<OsString>,
    settings: Settings,
    config: Config,
) -> Result<RunOptions, Failure> {
    let Some((containers, name)) = named(name, &config)? else {
        let message = format!("{}: no such container of yours on this node", quote(name.as_bytes()));
        return Err(
            Failure::new(message).hint("`enroot list` shows them; enroot create -n NAME FILE makes one")
        );
    };
    let name = parse_name(&name, NameMode::Auto)?;
    let mut options = options(Some(name), ImageSource::Recorded, command, settings, config)?;
    if let Some(named) = &mut options.named {
        named.scope = containers.scope().clone();
    }
    Ok(options)
}

/// Becomes the program; or why not.
fn exec(env: &[OsString], pid: u32, command: Vec<OsString>) -> Failure {
    let enter = || -> Result<Program, Failure> {
        let variables = parse_variables(env)?;
        let process = pid.to_string();
        let about = |failure: Failure| failure.about(format!("process {pid}"));
        let joined = container_process(&process).ok_or_else(|| {
            about(Failure::new("none of yours in a container on this node"))
                .hint("`enroot list -f` shows them")
        })?;
        let environment = Host::detect().environment;
        let (namespaces, mut facts) = open_process(&process, joined, &environment).map_err(about)?;
        facts.remapped = namespaces.enter_as_root().map_err(about)?;
        facts.environment = variables.into_iter().map(|variable| (variable, Origin::Option)).collect();
        let command = Explained { value: command, why: "the command line".to_owned() };
        Ok(Program::new(&RunOptions::default(), &facts, command, &environment))
    };
    enter().map_or_else(|failure| failure, |program| exec_program(&program))
}

fn list(fancy: bool, config: &Config) -> Result<String, Failure> {
    let mut text = String::new();
    if fancy {
        let _ = writeln!(text, "{:<20} {:>8} COMM", "NAME", "PID");
    }
    let mut found = Vec::new();
    for containers in Containers::all(config)? {
        for name in containers.names()? {
            let processes = if fancy { containers.processes(&name)? } else { Vec::new() };
            found.push((listed(&containers, &name)?, processes));
        }
    }
    found.sort();
    for (name, processes) in found {
        let shown = quote(name.as_bytes());
        if processes.is_empty() {
            let _ = writeln!(text, "{shown}");
        }
        for process in processes {
            let program = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            let _ = writeln!(text, "{shown:<20} {process:>8} {}", quote(program.trim_end().as_bytes()));
        }
    }
    Ok(text)
}

fn export(output: Option<PathBuf>, force: bool, name: &str, config: Config) -> Result<(), Failure> {
    let options = of_existing(name, Vec::new(), Settings::default(), config)?;
    let output = output.unwrap_or_else(|| format!("{name}.sqsh").into());
    let path = std::path::absolute(&output).unwrap_or(output);
    if !force && fs_server::is_there(&path) {
        return Err(Failure::new(format!("{}: the file exists", shown(&path))).hint("--force replaces it"));
    }
    let target = SaveTarget::open(&path, &importer::find()?)?;
    pipeline::save(options, &target)
}

fn remove(force: bool, names: &[String], config: &Config) -> ExitCode {
    if !force {
        return ended(Err(Failure::new("enroot remove: without --force enroot asks, and mizzen does not")
            .hint("enroot remove --force NAME removes it with all that was written in it")));
    }
    let remove = |name: &String| match named(name, config)? {
        Some((containers, name)) => remove_one(&containers, &name),
        None => remove_one(&Containers::global(config), name),
    };
    let failures: Vec<Failure> = names.iter().filter_map(|name| remove(name).err()).collect();
    failures.iter().for_each(report);
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn remove_one(containers: &Containers, name: &str) -> Result<(), Failure> {
    let outcome = containers.remove(&[name.to_owned()], false)?;
    match outcome.good {
        true => Ok(()),
        false => {
            Err(Failure::new(outcome.text.trim_end())
                .hint("`enroot list -f` shows what there is, and what runs"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_as_enroot_does() {
        for (image, name) in [
            ("ubuntu", "ubuntu.sqsh"),
            ("nvcr.io#nvidia/cuda:12.2", "nvidia+cuda+12.2.sqsh"),
            ("$oauthtoken@nvcr.io#nvidia/cuda", "nvidia+cuda.sqsh"),
        ] {
            assert_eq!(file_name(image), name);
        }
    }

    #[test]
    fn flags_of_mounts_are_joined_by_commas() {
        let parsed = |text: &str| parse_enroot_mount(OsStr::new(text)).map_err(|failure| failure.message);
        assert_eq!(parsed("/a:/b:ro,noexec"), parsed("/a:/b:ro+noexec"));
        assert_eq!(parsed("/a,b:/c").map(|mount| mount.target), Ok("/c".into()));
        assert_eq!(
            parsed("tmpfs /x tmpfs rw 0 0"),
            Err("--mount: \"tmpfs /x tmpfs rw 0 0\": lines of fstab are not read".to_owned())
        );
        assert!(parsed("/a:/b:sticky").unwrap_err().contains("unknown flag \"sticky\""));
    }

    #[test]
    fn names_are_names() {
        let message = |name| parse_name(name, NameMode::Auto).map_err(|failure| failure.message);
        assert_eq!(message("a").map(|name| name.name), Ok("a".to_owned()));
        assert_eq!(message("a/b"), Err("\"a/b\": the name has a /".to_owned()));
        assert_eq!(message("a:exec"), Err("\"a:exec\": the name has a colon".to_owned()));
        assert_eq!(message(""), Err("\"\": the name is empty".to_owned()));
    }
}
