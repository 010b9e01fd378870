//! The man pages: of the launcher's commands from the definitions of the command line, and of the options that the
//! plugin adds to Slurm's commands from the table that it registers them by.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use mizzen_core::Failure;
use mizzen_core::settings::Argument;
use mizzen_core::slurm_options::{self, Meaning, OptionSpec};

use crate::cli::Cli;

/// Writes all pages into a directory: those of section 1, and mizzen-slurm.7.
pub fn write_pages(directory: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::caused_by(directory.display(), error).or_hint("give a directory that you can write")
    };
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)?;
    fs::write(directory.join("mizzen-slurm.7"), slurm_page()).map_err(failed)
}

const HEAD: &str = r#".TH MIZZEN-SLURM 7
.SH NAME
mizzen-slurm \- containers in Slurm: options of srun, sbatch and salloc
.SH SYNOPSIS
.B srun
\-\-container=IMAGE [OPTIONS] PROGRAM [ARGUMENTS]
.br
.B #SBATCH
\-\-container=IMAGE
.br
.B salloc
\-\-container\-image=IMAGE
.SH DESCRIPTION
The tasks of a step run in the container that is made of IMAGE: a squashfs or SIF file, a directory, or the name of one in the site's image folders. All tasks of a step on a node share one container, which ends with the step. A relative path belongs to the directory in which the job was submitted.
.PP
A batch script runs inside as well, unless \-\-no\-container\-script is given; Slurm's commands can be called there although the image has none. What it starts with srun inherits the container: \-\-container=OTHER gives a step another one, \-\-container=none none.
.PP
Every setting by itself comes from the first of these that has it: an option, the container of the enclosing job, a variable (in the outermost command only), mizzen.toml.
.SH OPTIONS
"#;

const TAIL: &str = r#".SH EXIT STATUS
The program's; 125 if there is no container, 126 if the program cannot be executed, 127 if it is not in the container. What can be found wrong before the job is submitted ends the command with 1.
.SH FILES
.I /etc/mizzen/mizzen.toml
the site's settings
.SH SEE ALSO
.BR mizzen (1),
.BR mizzen\-plan (1),
.BR srun (1),
.BR sbatch (1),
.BR salloc (1)
"#;

fn slurm_page() -> String {
    let mut page = HEAD.to_owned();
    for option in slurm_options::all().iter().filter(|option| option.meaning != Meaning::Missing) {
        page.push_str(&entry(option));
    }
    page.push_str(TAIL);
    page
}

fn entry(option: &OptionSpec) -> String {
    let argument = match option.argument {
        Argument::No => String::new(),
        Argument::Optional(argument) => format!("[={argument}]"),
        Argument::Required(argument) => format!("={argument}"),
    };
    let (variable, more) = match option.meaning {
        Meaning::Image => (Some("MIZZEN_CONTAINER or MIZZEN_CONTAINER_IMAGE".to_owned()), ""),
        Meaning::Setting(key, Some("no")) => (Some(key.variable()), ""),
        Meaning::Setting(key, _) => (Some(key.variable()), key.spec().more),
        Meaning::Join | Meaning::Missing => (None, ""),
    };
    let variable = variable.map_or_else(String::new, |name| format!("; variable {name}"));
    let more = if more.is_empty() { String::new() } else { format!(". {more}") };
    let text = format!("{}{variable}{more}", option.help);
    format!(".TP\n.B \\-\\-{}\n{}\n", roff(&format!("{}{argument}", option.name)), roff(&text))
}

/// Text in which no letter means something to roff.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_and_the_users_guide_have_every_option() {
        let (page, guide) = (slurm_page(), include_str!("../../docs/users.md"));
        for option in slurm_options::all().iter().filter(|option| option.meaning != Meaning::Missing) {
            let name = &option.name;
            assert!(page.contains(&format!("\\-\\-{}", roff(name))), "{name}");
            let name = name.trim_start_matches("no-");
            let shown = [format!("--{name}"), format!("--[no-]{name}")];
            assert!(shown.iter().any(|shown| guide.contains(shown)), "docs/users.md lacks {name}");
        }
    }
}
