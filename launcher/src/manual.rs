//! The man pages: of the launcher's commands from the definitions of the command line, of mizzen.toml from the file that is
//! installed, and of the options that the plugin adds to Slurm's commands from the table that it registers them by.

mod slurm_page;
mod toml_page;

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_mangen::Man;
use mizzen_core::Failure;

use crate::cli::Cli;
pub(crate) use toml_page::SAMPLE;

/// Writes all pages into a directory: those of section 1, mizzen.toml.5 and mizzen-slurm.7.
pub fn write_pages(directory: &Path) -> Result<(), Failure> {
    let write = |(name, page): (String, String)| {
        fs::write(directory.join(name), page).map_err(|error| {
            Failure::caused_by(directory.display(), error).or_hint("give a directory that you can write")
        })
    };
    pages()?.into_iter().try_for_each(write)
}

/// The files' names and their content.
fn pages() -> Result<Vec<(String, String)>, Failure> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut pages = vec![
        ("mizzen.toml.5".to_owned(), toml_page::page()),
        ("mizzen-slurm.7".to_owned(), slurm_page::page()),
    ];
    add_commands(&mut pages, command)
        .map_err(|error| Failure::caused_by("cannot make the man pages", error))?;
    Ok(pages)
}

fn add_commands(pages: &mut Vec<(String, String)>, command: clap::Command) -> std::io::Result<()> {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        add_commands(pages, command.clone())?;
    }
    let name = command.get_display_name().unwrap_or("mizzen").to_owned();
    pages.push((format!("{name}.1"), command_page(&name, command)?));
    Ok(())
}

/// The page of one command. What clap_mangen makes of examples and synopses is hard to read: it fills the lines of the
/// former, and leaves the arguments of options out of the latter.
fn command_page(name: &str, mut command: clap::Command) -> std::io::Result<String> {
    let usage = synopsis(&command.render_usage().to_string());
    let examples = command.get_after_help().map(|text| examples(&text.to_string())).unwrap_or_default();
    let has_subcommands = command.has_subcommands();
    let page = Man::new(command);
    let mut text = title(name, 1).into_bytes();
    page.render_name_section(&mut text)?;
    text.extend(usage.bytes());
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if has_subcommands {
        page.render_subcommands_section(&mut text)?;
    }
    text.extend(examples.bytes());
    text.extend(see_also(name).bytes());
    let text = String::from_utf8_lossy(&text);
    // An empty line is a break whose height nobody has chosen.
    Ok(text.replace("\n\n", "\n.sp\n"))
}

/// The first lines of a page. Words are not hyphenated and lines not stretched: people copy names of options.
fn title(name: &str, section: u32) -> String {
    format!(
        ".TH {} {section} \"\" \"mizzen {}\"\n.nh\n.ad l\n",
        roff(&name.to_uppercase()),
        env!("CARGO_PKG_VERSION")
    )
}

/// clap's line, which may be several.
fn synopsis(usage: &str) -> String {
    let lines = usage.trim_start_matches("Usage:").lines().map(|line| roff(line.trim()));
    format!(".SH SYNOPSIS\n{}\n", lines.collect::<Vec<String>>().join("\n.br\n"))
}

/// Headings, and below them indented lines of two columns, which two spaces keep apart.
fn examples(help: &str) -> String {
    let mut page = String::new();
    for line in help.lines().filter(|line| !line.is_empty()) {
        match line.strip_prefix("  ") {
            None => page.push_str(&format!(".SH {}\n", roff(&line.trim_end_matches(':').to_uppercase()))),
            Some(line) => {
                let columns = line.split_once("  ");
                page.push_str(&match columns {
                    Some((left, right)) => {
                        format!(".TP\n\\fB{}\\fR\n{}\n", roff(left), roff(right.trim_start()))
                    }
                    None => format!(".PP\n\\fB{}\\fR\n", roff(line)),
                });
            }
        }
    }
    page
}

fn see_also(name: &str) -> String {
    let pages = [("mizzen", 1), ("mizzen.toml", 5), ("mizzen-slurm", 7)];
    let others = pages.iter().filter(|(page, _)| *page != name);
    let others = others.map(|(page, section)| format!(".BR {} ({section})", roff(page)));
    format!(".SH SEE ALSO\n{}\n", others.collect::<Vec<String>>().join(",\n"))
}

/// Text in which no letter means something to roff.
fn roff(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '\\' => escaped.push_str("\\e"),
            '-' => escaped.push_str("\\-"),
            '`' => escaped.push_str("\\(ga"),
            '\'' => escaped.push_str("\\(aq"),
            '"' => escaped.push_str("\\(dq"),
            '…' => escaped.push_str("..."),
            other => escaped.push(other),
        }
    }
    if escaped.starts_with('.') { format!("\\&{escaped}") } else { escaped }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_have_a_heading_and_two_columns() {
        let help = "Examples:\n  mizzen run a.sqsh   what it is\n  tar x | mizzen import -";
        let page = ".SH EXAMPLES\n.TP\n\\fBmizzen run a.sqsh\\fR\nwhat it is\n.PP\n\\fBtar x | mizzen import \\-\\fR\n";
        assert_eq!(examples(help), page);
    }

    #[test]
    fn every_command_has_a_page() {
        let pages = pages().unwrap();
        for name in ["mizzen.1", "mizzen-run.1", "mizzen-cache-list.1", "mizzen.toml.5", "mizzen-slurm.7"] {
            let (_, page) = pages.iter().find(|(page, _)| page == name).unwrap();
            assert!(page.starts_with(".TH MIZZEN"), "{page}");
            for line in page.lines() {
                assert!(!line.is_empty() && line.trim_end() == line, "{name}: {line:?}");
            }
        }
        let run = &pages.iter().find(|(name, _)| name == "mizzen-run.1").unwrap().1;
        assert!(run.contains(".SH SYNOPSIS\nmizzen run [OPTIONS] <IMAGE> [COMMAND]...\n"), "{run}");
        assert!(
            run.contains(".SH EXAMPLES\n.TP\n\\fBmizzen run tf.sqsh python train.py\\fR\nthe home"),
            "{run}"
        );
    }
}
