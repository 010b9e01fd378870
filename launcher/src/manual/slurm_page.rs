//! mizzen-slurm(7): the options of srun, sbatch and salloc.

use mizzen_core::settings::Argument;
use mizzen_core::slurm_options::{self, Meaning, OptionSpec};

use super::{roff, title};

const HEAD: &str = r#".SH NAME
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
The tasks of a step run in the container that is made of IMAGE: a squashfs or SIF file, a directory, the name of one in the site\(aqs image folders, or an image in a registry (docker://NAME). All tasks of a step on a node share one container, which ends with the step. A relative path belongs to the directory in which the job was submitted.
.PP
A batch script runs inside as well, unless \-\-no\-container\-script is given; Slurm\(aqs commands can be called there although the image has none. What it starts with srun inherits the container: \-\-container=OTHER gives a step another one, \-\-container=none none.
.PP
Every setting by itself comes from the first of these that has it: an option, the container of the enclosing job, a variable (in the outermost command only), mizzen.toml.
.SH OPTIONS
"#;

const TAIL: &str = r#".SH EXIT STATUS
The program\(aqs; 125 if there is no container, 126 if the program cannot be executed, 127 if it is not in the container. What can be found wrong before the job is submitted ends the command with 1.
.SH FILES
.TP
.I /etc/mizzen/mizzen.toml
the site\(aqs settings
.TP
.I ~/.edf/NAME.toml, /etc/edf/NAME.toml
environment files; the variable EDF_PATH names other directories in place of ~/.edf
.SH SEE ALSO
.BR mizzen (1),
.BR mizzen\-plan (1),
.BR mizzen.toml (5),
.BR srun (1),
.BR sbatch (1),
.BR salloc (1)
"#;

/// The page.
pub(super) fn page() -> String {
    let mut page = title("mizzen-slurm", 7) + HEAD;
    for option in slurm_options::all().iter() {
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
        Meaning::Environment => (Some("MIZZEN_ENVIRONMENT or MIZZEN_EDF".to_owned()), ""),
        Meaning::Setting(key, Some("no")) => (Some(key.variable()), ""),
        Meaning::Setting(key, _) => (Some(key.variable()), key.spec().more),
        Meaning::Join => (None, ""),
    };
    let variable = variable.map_or_else(String::new, |name| format!("; variable {name}"));
    let more = if more.is_empty() { String::new() } else { format!(". {more}") };
    let text = format!("{}{variable}{more}", option.help);
    format!(".TP\n.B \\-\\-{}\n{}\n", roff(&format!("{}{argument}", option.name)), roff(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_and_the_users_guide_have_every_option() {
        let (page, guide) = (page(), include_str!("../../../docs/users.md"));
        for option in slurm_options::all().iter() {
            let name = &option.name;
            assert!(page.contains(&format!("\\-\\-{}", roff(name))), "{name}");
            let name = name.trim_start_matches("no-");
            let shown = [format!("--{name}"), format!("--[no-]{name}")];
            assert!(shown.iter().any(|shown| guide.contains(shown)), "docs/users.md lacks {name}");
        }
    }
}
