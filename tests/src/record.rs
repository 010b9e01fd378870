//! `vcluster record`: the picture of a session in README.md. The commands are run on a cluster; what is drawn is what they printed.

use std::fmt::Write;
use std::fs;

use anyhow::{Context, Result, ensure};

use crate::documents::Page;
use crate::{Cluster, images, repository, without_waiting};

/// The commands, with the exit code that they have.
const SESSION: [(&str, i32); 4] = [
    ("srun -N2 --ntasks-per-node=2 --container=py.sqsh --mpi=pmix python3 train.py", 0),
    ("srun --container=docker://busybox sh -c 'echo $(hostname), $(id -un), $(busybox | head -n 1)'", 0),
    ("srun --container=pi.sqsh python3 train.py", 1),
    ("mizzen run py.sqsh python3 -c 'import numpy; print(numpy.__version__)'     # without Slurm", 0),
];

/// How many letters a line has, and what they measure.
const COLUMNS: usize = 126;
const LETTER: (f32, f32) = (7.7, 17.0);

/// Runs the session and writes docs/run.svg.
pub fn record() -> Result<()> {
    Ok(fs::write(repository().join("docs/run.svg"), picture(&session()?))?)
}

/// The lines of the picture that there is, commands with `$ ` before them.
pub fn recorded() -> Result<Vec<String>> {
    Ok(shown(&fs::read_to_string(repository().join("docs/run.svg"))?))
}

/// The lines that it would have now.
pub fn printed_now() -> Result<Vec<String>> {
    Ok(shown(&picture(&session()?)))
}

/// Runs the session: its lines, and which of them are commands.
fn session() -> Result<Vec<(bool, String)>> {
    let hub = crate::registry::LocalRegistry::start()?;
    let layout = crate::registry::Layout::new()?;
    layout.image("busybox", &[&images::ImageTree::busybox()?], &[])?;
    hub.push(&layout, "busybox", "library/busybox:latest", &[])?;
    let mirror = "[registries.\"docker.io\"]\nmirrors = [\"http://ctl:5000\"]\n";
    let cluster =
        Cluster::start(crate::Spec { mizzen_toml: Some(mirror.to_owned()), ..Cluster::spec("record") })?;
    let _served = hub.serve_on(&cluster, 5000, None)?;
    cluster.share("py.sqsh", &images::mpi()?)?;
    let blocks = Page::read("docs/quick-start.md")?.blocks()?;
    let program = blocks.iter().find(|block| block.value("file") == Some("train.py"));
    cluster.share("train.py", program.context("docs/quick-start.md has no train.py")?.text.as_bytes())?;
    ensure!(cluster.run("ln -s /shared/py.sqsh . && cp /shared/train.py .").code == 0);
    let mut lines = Vec::new();
    for (command, code) in SESSION {
        let done = cluster.run(&format!("exec 2>&1; {command}"));
        ensure!(done.code == code, "{command}: {}", done.text());
        lines.push((true, command.to_owned()));
        let printed = without_waiting(&done.stdout);
        // A terminal shows the last state of a line that is written over.
        let shown = printed.lines().map(|line| line.rsplit('\r').next().unwrap_or_default());
        lines.extend(shown.flat_map(wrapped).map(|line| (false, line)));
    }
    Ok(lines)
}

fn wrapped(line: &str) -> Vec<String> {
    let letters: Vec<char> = line.chars().collect();
    letters.chunks(COLUMNS).map(|part| part.iter().collect()).collect()
}

fn picture(lines: &[(bool, String)]) -> String {
    let height = lines.len() as f32 * LETTER.1 + 30.0;
    let width = COLUMNS as f32 * LETTER.0 + 30.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
         aria-label=\"A session with mizzen, as recorded\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#14191f\"/>\n\
         <g font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" font-size=\"12.8\" fill=\"#c8d3de\" \
         xml:space=\"preserve\">\n"
    );
    for (number, (is_command, text)) in lines.iter().enumerate() {
        let y = number as f32 * LETTER.1 + 27.0;
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        // Writing to a String cannot fail.
        let _ = match is_command {
            true => writeln!(
                svg,
                "<text x=\"15\" y=\"{y}\"><tspan fill=\"#6cc082\">$ </tspan><tspan fill=\"#ffffff\" font-weight=\"bold\">{text}</tspan></text>"
            ),
            false => writeln!(svg, "<text x=\"15\" y=\"{y}\">{text}</text>"),
        };
    }
    svg + "</g>\n</svg>\n"
}

/// The text of a picture, line by line.
fn shown(svg: &str) -> Vec<String> {
    let lines = svg.lines().filter(|line| line.starts_with("<text "));
    let text = lines.map(|line| {
        let words: String =
            line.split('<').filter_map(|part| part.split_once('>')).map(|(_, text)| text).collect();
        words.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    });
    text.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_drawn_as_it_is() {
        let svg = picture(&[(true, "a && b".to_owned()), (false, "<c>".to_owned())]);
        assert!(svg.contains(">a &amp;&amp; b</tspan>") && svg.contains(">&lt;c&gt;</text>"), "{svg}");
        assert_eq!(shown(&svg), ["$ a && b", "<c>"]);
        assert_eq!(wrapped(&"x".repeat(COLUMNS + 1)).len(), 2);
    }
}
