//! `mizzen-import`, which `mizzen import` and its like start.

use std::process::ExitCode;

fn main() -> ExitCode {
    mizzen_import::run_process()
}
