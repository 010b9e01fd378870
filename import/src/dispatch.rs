//! Which command does what, of those that the launcher hands to this program. Runs as the user.

use std::process::ExitCode;

use mizzen::cli::Command;
use mizzen::cli::images::{ImagesCommand, ImportArgs};
use mizzen::report::{print, report};
use mizzen::signals::IgnoreSignal;
use mizzen_core::config::Source;
use mizzen_core::image_store::own_directory;
use mizzen_core::importer::{encode_answer, encode_saved};
use mizzen_core::{Config, Failure};
use nix::sys::signal::Signal;
use rustix::fs::Mode;
use rustix::process::umask;

use crate::commands::{self, Imported};
use crate::images::{self, Outcome};
use crate::interrupt;
use crate::store::Store;
use crate::store::select::{latest, select};

/// Does what the process was started for.
pub fn run_process() -> ExitCode {
    mizzen::trace::init();
    let cli = match mizzen::parse_words() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    // Whatever the user's mask is for: who makes a file can read it.
    let mask = umask(Mode::RWXG | Mode::RWXO);
    umask(mask & (Mode::RWXG | Mode::RWXO));
    // The user's limit on the size of files is a failure of what is written, and nothing to die of.
    let _unharmed = IgnoreSignal::new(Signal::SIGXFSZ);
    if let Err(failure) = interrupt::listen() {
        report(&failure);
        return ExitCode::FAILURE;
    }
    match cli.command {
        Command::Import(args) if args.for_slurm => answer(&args),
        Command::Import(ImportArgs { save_as: Some(title), output: Some(output), source, quiet, .. }) => {
            told(commands::save(&source, &output, &title, !quiet).map(|saved| encode_saved(saved.size)))
        }
        Command::Import(args) => mizzen::ended(import(&args)),
        Command::Export(args) => mizzen::ended(config().and_then(|config| commands::export(&args, &config))),
        Command::Images { json, command } => {
            let outcome = images(command.unwrap_or(ImagesCommand::List));
            mizzen::ended(outcome.and_then(|outcome| {
                print(&if json { format!("{:#}\n", outcome.json) } else { outcome.text })
            }))
        }
        Command::Login(args) => mizzen::ended(config().and_then(|config| commands::login(&args, &config))),
        Command::Logout(args) => mizzen::ended(config().and_then(|config| commands::logout(&args, &config))),
        _ => {
            report(&Failure::new("mizzen-import: not a command of the importer").hint("call `mizzen`"));
            ExitCode::from(2)
        }
    }
}

fn config() -> Result<Config, Failure> {
    Config::of_this_machine()
}

fn config_of(args: &ImportArgs) -> Result<Config, Failure> {
    match &args.config {
        Some(path) => Config::load(&Source::Named(path.clone())),
        // Who asks for a job has told where the settings are, if they are elsewhere.
        None if args.for_slurm => Config::load(&Source::Default),
        None => config(),
    }
}

fn import(args: &ImportArgs) -> Result<(), Failure> {
    let Imported { path, json, .. } = commands::import(args, &config_of(args)?)?;
    if args.json {
        return print(&format!("{json:#}\n"));
    }
    // Whoever names the file knows where it is.
    if args.output.is_some() { Ok(()) } else { print(&format!("{}\n", path.display())) }
}

/// What the plugin reads: one line, or the failure.
fn answer(args: &ImportArgs) -> ExitCode {
    let outcome = config_of(args).and_then(|config| {
        if args.resolve_only {
            return commands::resolve(args, &config).map(|reference| (None, reference));
        }
        let imported = commands::import(args, &config)?;
        let reference =
            imported.reference.ok_or_else(|| Failure::new("not the name of an image in a registry"));
        Ok((Some(imported.path), reference?))
    });
    told(outcome.map(|(path, reference)| encode_answer(path.as_deref(), &reference) + "\n"))
}

/// Hands an answer, or the failure, to the program that waits for it.
fn told(outcome: Result<String, Failure>) -> ExitCode {
    let (text, code) = match outcome {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(failure) => (failure.encode(), ExitCode::FAILURE),
    };
    match print(&text) {
        Ok(()) => code,
        Err(failure) => {
            report(&failure);
            ExitCode::FAILURE
        }
    }
}

fn images(command: ImagesCommand) -> Result<Outcome, Failure> {
    let config = config()?;
    let directory = own_directory(&config.image_store)?;
    let store = || match Store::open_existing(&directory)? {
        Some(store) => Ok(store),
        None => Err(Failure::new(format!("{}: there is no image store yet", crate::shown(&directory)))
            .hint("`mizzen import docker://…` makes it")),
    };
    match command {
        ImagesCommand::List => Ok(images::show(&config.image_folders, &directory)),
        ImagesCommand::Remove { all, images } => images::remove(&store()?, &images, all),
        ImagesCommand::Prune { older_than, keep, dry_run } => {
            images::prune(&store()?, older_than, keep, dry_run)
        }
        ImagesCommand::Update { account, quiet, images } => {
            let store = store()?;
            let all = images::stored(&store)?;
            let chosen = if images.is_empty() { all.iter().collect() } else { select(&all, &images)? };
            commands::update(&latest(chosen), &account, quiet, &config)
        }
    }
}
