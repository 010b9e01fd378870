//! `mizzen`, the launcher. Everything is in the library, where tests and fuzzers find it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    mizzen::run_process()
}
