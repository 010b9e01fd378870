//! `mizzen`, the launcher. Always runs as the user who calls it.
#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

use clap::Parser;
use mizzen_core::Config;
use mizzen_core::config::{DEFAULT_PATH, Source};

use cli::{Cli, Command};

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::CheckConfig { file } => {
            let shown = file.clone().unwrap_or_else(|| DEFAULT_PATH.into());
            let source = file.map_or(Source::Default, Source::Named);
            Config::load(&source).map(|_| println!("{}: good", shown.display()))
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("mizzen: {failure}");
            if let Some(hint) = failure.hint {
                eprintln!("mizzen: hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}
