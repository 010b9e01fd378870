//! Runs the fuzzers of all parsers and says what they found.
//!
//! The instrumented program is `parsers`, built by `make fuzz`; this one gives it seeds, a place for what it learns, and a
//! time. What a fuzzer learns is kept in `target/fuzz/corpus`, and the next run goes on from there.
#![allow(clippy::print_stdout, clippy::print_stderr)] // a tool for developers
#![forbid(unsafe_code)]

mod seeds;
mod targets;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use mizzen_tests::target_dir;

const USAGE: &str = "usage: mizzen-fuzz PARSERS SECONDS [NAME]...";
/// One input may not take longer, on a machine that does other things too.
const SECONDS_PER_INPUT: u32 = 10;
/// Nor may it need more memory than a launcher on a busy node gets.
const MEMORY_MIB: u32 = 512;

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [program, seconds, wanted @ ..] = args.as_slice() else { bail!(USAGE) };
    let seconds: u32 = seconds.parse().context(USAGE)?;
    let names: Vec<&str> = targets::all().map(|(name, _)| name).collect();
    if let Some(unknown) = wanted.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("{unknown}: no such parser; there are {names:?}");
    }
    let wanted = |name: &&str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    let waiting = Mutex::new(names.iter().copied().filter(wanted));
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let home = target_dir().join("fuzz");
    fs::create_dir_all(&home)?;
    let home = home.canonicalize()?;
    // One fuzzer uses one processor.
    let processors = std::thread::available_parallelism()?.get();
    let work = || -> Result<bool> {
        let mut sound = true;
        while let Some(name) = next() {
            let run = Run { name, program: Path::new(program), home: &home };
            sound &= run.fuzz(seconds)?;
        }
        Ok(sound)
    };
    let results: Vec<Result<bool>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or(Ok(false))).collect()
    });
    let sound = results.into_iter().collect::<Result<Vec<bool>>>()?.into_iter().all(|sound| sound);
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A parser and its fuzzer.
struct Run<'a> {
    name: &'a str,
    program: &'a Path,
    /// `target/fuzz`
    home: &'a Path,
}

impl Run<'_> {
    /// Fuzzes for some seconds and prints the result: true if the parser survived.
    fn fuzz(&self, seconds: u32) -> Result<bool> {
        let (seeds, corpus, crashes) =
            (self.directory("seeds")?, self.directory("corpus")?, self.directory("crashes")?);
        for (number, seed) in seeds::of(self.name)?.iter().enumerate() {
            fs::write(seeds.join(number.to_string()), seed)?;
        }
        let output = Command::new(self.program)
            .env("FUZZ", self.name)
            .env("RUST_BACKTRACE", "1")
            .args([&corpus, &seeds])
            .arg(format!("-artifact_prefix={}/", crashes.display()))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-timeout={SECONDS_PER_INPUT}"))
            .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
            .arg("-print_final_stats=1")
            .output()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        let executions: u64 =
            find(&said, "stat::number_of_executed_units:").and_then(|n| n.parse().ok()).unwrap_or(0);
        if output.status.success() && executions > 0 {
            let (name, rate) = (self.name, executions / u64::from(seconds.max(1)));
            println!("{name:<14} {executions:>9} executions in {seconds} s, {rate} per second; no crash");
            return Ok(true);
        }
        let log = self.home.join(format!("{}.log", self.name));
        fs::write(&log, said.as_bytes())?;
        let why = said.lines().find(|line| line.contains("panicked at") || line.contains("ERROR: libFuzzer"));
        println!(
            "{:<14} FAILED after {executions} executions: {}",
            self.name,
            why.unwrap_or("it did not run")
        );
        if let Some(input) = find(&said, "Test unit written to") {
            println!("               again: FUZZ={} {} {input}", self.name, self.program.display());
        }
        println!("               all that it said: {}", log.display());
        Ok(false)
    }

    fn directory(&self, what: &str) -> Result<PathBuf> {
        let path = self.home.join(what).join(self.name);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// The rest of the line in which `what` stands.
fn find<'a>(text: &'a str, what: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.split_once(what)?.1.trim()))
}
