//! Which command does what: the words of a command line, and the names under which Slurm and its plugin start the launcher.
//! Runs as the user who calls it.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use mizzen_core::failure::FailureKind;
use mizzen_core::staging::BROADCASTER;
use mizzen_core::{Config, Failure};

use crate::cli::{CacheCommand, Cli, Command, ConfigCommand, ContainersCommand, EnvCommand};
use crate::containers::commands::Containers;
use crate::options::RunOptions;
use crate::report::{print, report, written};
use crate::stage::commands::{Outcome, Stager};
use crate::{
    check_config, cli, doctor, enroot, environment, importer, inspect, manual, pipeline, raised_limits,
    share, show_config, slurm, stage, step, sys, trace,
};

/// Does what the process was started for.
pub fn run_process() -> ExitCode {
    let mut words = std::env::args_os();
    let called = words.next().unwrap_or_default();
    // Hands its limits on, and needs little.
    if let Some(command) = slurm::command_named(&called) {
        return slurm::shim::run(command, words);
    }
    if let Some(descriptor) = step::entrypoint::descriptor_to_note(&called, std::env::args_os().skip(1)) {
        return step::entrypoint::note(&descriptor);
    }
    if let Err(failure) = raised_limits::raise_stack() {
        report(&failure);
        return ExitCode::from(failure.kind.exit_code());
    }
    trace::init();
    work(Path::new(&called), words)
}

/// Not a part of its caller, whose own stack must be small.
#[inline(never)]
fn work(called: &Path, words: impl Iterator<Item = OsString>) -> ExitCode {
    if called.file_name().is_some_and(|name| name == step::NAME) {
        return step::run();
    }
    if called.file_name().is_some_and(|name| name == enroot::NAME) {
        return enroot::run(words);
    }
    if called == Path::new(BROADCASTER) {
        return stage::broadcast::run(words);
    }
    let cli = match parse_words() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let outcome = match cli.command {
        Command::Run(container) => return run(container),
        Command::Plan { json, container } => container
            .into_options()
            .and_then(|options| pipeline::plan(&options))
            .and_then(|plan| print(&if json { format!("{:#}\n", plan.to_json()) } else { plan.to_text() })),
        Command::Inspect { json, image } => inspect::inspect(&image).and_then(|found| {
            print(&if json { format!("{:#}\n", found.to_json()) } else { found.to_text() })
        }),
        Command::Stage { images } => return stage_all(&images),
        Command::Env { json, command } => return env(&command, json),
        Command::Import(args) if args.for_slurm => return importer::exec_for_program(),
        Command::Import(_)
        | Command::Export(_)
        | Command::Images { .. }
        | Command::Login(_)
        | Command::Logout(_) => Err(importer::exec()),
        Command::Cache { json, command } => return cache(&command, json),
        Command::Containers { json, command } => return containers(&command, json),
        Command::Doctor { json, gpu: false, fabric: false } => return doctor::examine(json),
        Command::Doctor { json, gpu, fabric } => doctor::host_libraries(json, gpu, fabric),
        Command::Config { json, command: ConfigCommand::Show } => show_config::run(json),
        Command::CheckConfig { file } => check_config::run(file.as_deref()),
        Command::Completions { shell } => {
            // Into memory first: the crate panics where it cannot write.
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "mizzen", &mut text);
            print(&String::from_utf8_lossy(&text))
        }
        Command::Man { directory } => manual::write_pages(&directory),
    };
    ended(outcome)
}

/// The words of this process's command line; or the exit code, where the help was asked for or they are wrong.
pub fn parse_words() -> Result<Cli, ExitCode> {
    // A wrong `mizzen run` must not look like a program that exits with 2.
    let runs = std::env::args_os().nth(1).is_some_and(|command| command == "run");
    Cli::try_parse().map_err(|error| told_by_clap(&error, runs))
}

/// Tells of a failure, if there is one.
pub fn ended(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report(&failure);
            ExitCode::FAILURE
        }
    }
}

/// The help and the version, which are results, or what is wrong with the words of a command, which may run a program.
pub fn told_by_clap(error: &clap::Error, runs: bool) -> ExitCode {
    if !error.use_stderr() {
        let printed = sys::check_stdout().and_then(|()| error.print());
        return ended(written(printed.and_then(|()| std::io::stdout().flush())));
    }
    // Nobody is left to be told when this fails.
    let _ = error.print();
    ExitCode::from(if runs { FailureKind::CannotStart.exit_code() } else { 2 })
}

fn run(container: cli::ContainerArgs) -> ExitCode {
    ran(container.into_options().and_then(start))
}

/// Runs a program in a container: its exit code.
pub fn start(options: RunOptions) -> Result<i32, Failure> {
    match share::find(&options)? {
        None => pipeline::run(options),
        Some(shared) => share::run(&options, &shared),
    }
}

/// Ends as the program did, or tells why there was none.
pub fn ran(outcome: Result<i32, Failure>) -> ExitCode {
    match outcome {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(FailureKind::CannotStart.exit_code())),
        Err(failure) => {
            report(&failure);
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

/// One that fails does not keep the others from being copied.
fn stage_all(images: &[PathBuf]) -> ExitCode {
    let stager = match Config::of_this_machine().and_then(Stager::new) {
        Ok(stager) => stager,
        Err(failure) => {
            report(&failure);
            return ExitCode::FAILURE;
        }
    };
    let mut code = ExitCode::SUCCESS;
    for image in images {
        if let Err(failure) = stager.stage(image).and_then(|line| print(&line)) {
            report(&failure);
            code = ExitCode::FAILURE;
        }
    }
    code
}

fn env(command: &EnvCommand, json: bool) -> ExitCode {
    let outcome = match command {
        EnvCommand::Render { for_slurm: true, config, name } => {
            return environment::answer_program(name, config.as_deref());
        }
        EnvCommand::Render { name, .. } => environment::render(name, json),
        EnvCommand::List => environment::list(json),
        EnvCommand::Validate { names } => match environment::validate(names) {
            Ok(code) => return code,
            Err(failure) => Err(failure),
        },
    };
    ended(outcome)
}

fn cache(command: &CacheCommand, json: bool) -> ExitCode {
    let outcome = Config::of_this_machine()
        .and_then(|config| stage::commands::Commands::new(&config))
        .and_then(|cache| match command {
            CacheCommand::List => cache.list(),
            CacheCommand::Verify => cache.verify(),
            CacheCommand::Prune => cache.prune(),
            CacheCommand::Remove { all, images } => cache.remove(images, *all),
        });
    show(outcome, json)
}

fn containers(command: &ContainersCommand, json: bool) -> ExitCode {
    let outcome = Config::of_this_machine().and_then(|config| match command {
        ContainersCommand::List => Containers::new(&config, None).list(),
        ContainersCommand::Remove { job, all, names } => Containers::new(&config, *job).remove(names, *all),
        ContainersCommand::Prune { job } => Containers::new(&config, *job).prune(*job),
    });
    show(outcome, json)
}

/// Prints a result, for people or for programs.
fn show(outcome: Result<Outcome, Failure>, json: bool) -> ExitCode {
    let printed = outcome.and_then(|outcome| {
        print(&if json { format!("{:#}\n", outcome.json) } else { outcome.text })?;
        Ok(outcome.good)
    });
    match printed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            report(&failure);
            ExitCode::FAILURE
        }
    }
}
