//! `vcluster browse`: every page of the book in a headless Chromium, as wide as a desktop and as a phone. No page may be wider than
//! its window, miss a file, have a link that leads to none, or report an error. A picture of each stays in `target/book-pictures`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::target_dir;

const PROGRAM: &str = "chromium-headless-shell";
const WINDOWS: [(&str, u32, u32); 2] = [("desktop", 1280, 900), ("phone", 375, 800)];

/// What sticks out of the window. A box that scrolls by itself may have more in it; the page itself must not scroll, and the
/// theme cuts off what is wider, so that its own width does not tell.
const WIDER: &str = "(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = e => e && e.tagName != 'MAIN' && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const wide = [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement));
  const page = document.documentElement.scrollWidth > width ? ['the page scrolls sideways'] : [];
  return [...page, ...wide.slice(0, 5).map(e => e.tagName + ' is wider than the window: ' + e.textContent.trim().slice(0, 60))];
})()";

/// Looks at every page.
pub fn browse() -> Result<()> {
    let book = target_dir().join("book").canonicalize().context("run `make docs` first")?;
    let pictures = target_dir().join("book-pictures");
    fs::create_dir_all(&pictures)?;
    let mut browser = Browser::start()?;
    let mut pages: Vec<_> = fs::read_dir(&book)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    // Of the frame that is shown without scripts, and of the page for servers, the links lead elsewhere.
    let is_page =
        |path: &Path| path.extension().is_some_and(|kind| kind == "html") && !path.ends_with("404.html");
    pages.retain(|path| is_page(path) && !path.ends_with("toc.html"));
    pages.sort();
    let mut wrong = Vec::new();
    for page in &pages {
        for (window, width, height) in WINDOWS {
            let name = page.file_stem().unwrap_or_default().to_string_lossy();
            let picture = pictures.join(format!("{name}-{window}.png"));
            let found = browser.look(page, width, height, &picture)?;
            wrong.extend(found.into_iter().map(|what| format!("{name}, {window}: {what}")));
        }
        wrong.extend(dead_links(page)?);
    }
    ensure!(pages.len() > 10, "{} has {} pages", book.display(), pages.len());
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    writeln!(std::io::stdout(), "{} pages are well; pictures are in {}", pages.len(), pictures.display())?;
    Ok(())
}

/// The links of a page to files of the book that are not there, or to a heading that the file does not have.
fn dead_links(page: &Path) -> Result<Vec<String>> {
    let read = |file: &Path| fs::read_to_string(file).with_context(|| file.display().to_string());
    let text = read(page)?;
    let mut dead = Vec::new();
    for link in text.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
        if ["http:", "https:", "mailto:", "data:"].iter().any(|elsewhere| link.starts_with(elsewhere)) {
            continue;
        }
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = match file {
            "" => page.to_owned(),
            file => page.parent().unwrap_or(Path::new("")).join(file),
        };
        let is_page = target.extension().is_some_and(|kind| kind == "html");
        let is_there = target.is_file()
            && (anchor.is_empty() || !is_page || read(&target)?.contains(&format!("id=\"{anchor}\"")));
        if !is_there {
            dead.push(format!("{}: {link} leads nowhere", page.display()));
        }
    }
    Ok(dead)
}

/// A browser that is told what to do through pipes, in messages of JSON that a NUL ends.
struct Browser {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    session: Value,
    last: u64,
    /// What it has reported on its own since the last look.
    events: Vec<Value>,
}

impl Browser {
    fn start() -> Result<Browser> {
        // It wants its pipes as descriptors 3 and 4. Root needs --no-sandbox; the pages are ours.
        let script = format!(
            "exec {PROGRAM} --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe 3<&0 4>&1 </dev/null >/dev/null 2>&1"
        );
        let mut process =
            Command::new("sh").args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = process.stdin.take().context("no pipe")?;
        let output = BufReader::new(process.stdout.take().context("no pipe")?);
        let mut browser =
            Browser { process, input, output, session: Value::Null, last: 0, events: Vec::new() };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = browser.call("Target.attachToTarget", attach)?["sessionId"].clone();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// Sends a command and waits for its answer.
    fn call(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.last += 1;
        let mut message = json!({ "id": self.last, "method": method, "params": parameters });
        if self.session.is_string() {
            message["sessionId"] = self.session.clone();
        }
        self.input
            .write_all(format!("{message}\0").as_bytes())
            .with_context(|| format!("{PROGRAM} is needed"))?;
        loop {
            let message = self.receive()?;
            if message["id"] == self.last {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].clone());
            }
            self.events.push(message);
        }
    }

    fn receive(&mut self) -> Result<Value> {
        let mut bytes = Vec::new();
        self.output.read_until(0, &mut bytes)?;
        ensure!(bytes.pop() == Some(0), "{PROGRAM} has ended: is it installed? apt-get install {PROGRAM}");
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// What is wrong with a page in a window of this size.
    fn look(&mut self, page: &Path, width: u32, height: u32, picture: &Path) -> Result<Vec<String>> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.call("Emulation.setDeviceMetricsOverride", size)?;
        self.events.clear();
        self.call("Page.navigate", json!({ "url": format!("file://{}", page.display()) }))?;
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            let event = self.receive()?;
            self.events.push(event);
        }
        let wide = self.call("Runtime.evaluate", json!({ "expression": WIDER, "returnByValue": true }))?;
        let wide = wide["result"]["value"].as_array().with_context(|| format!("{wide}"))?.clone();
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }))?;
        fs::write(picture, base64(shot["data"].as_str().unwrap_or_default()))?;
        let mut wrong: Vec<String> = wide.iter().map(Value::to_string).collect();
        wrong.extend(self.events.iter().filter(|event| is_error(event)).map(Value::to_string));
        Ok(wrong)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn is_error(event: &Value) -> bool {
    let parameters = &event["params"];
    match event["method"].as_str() {
        Some("Runtime.exceptionThrown" | "Network.loadingFailed") => true,
        Some("Runtime.consoleAPICalled") => parameters["type"] == "error",
        Some("Log.entryAdded") => parameters["entry"]["level"] == "error",
        _ => false,
    }
}

fn base64(text: &str) -> Vec<u8> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => u32::from(letter - b'A'),
        b'a'..=b'z' => u32::from(letter - b'a') + 26,
        b'0'..=b'9' => u32::from(letter - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    let letters: Vec<u8> = text.bytes().filter(|letter| *letter != b'=').collect();
    let groups = letters.chunks(4).flat_map(|group| {
        let bits =
            group.iter().enumerate().fold(0, |bits, (at, letter)| bits | value(*letter) << (18 - 6 * at));
        bits.to_be_bytes()[1..group.len()].to_vec()
    });
    groups.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let book = crate::target_dir().join("links-of-a-book");
        fs::create_dir_all(&book).unwrap();
        let page = book.join("a.html");
        fs::write(book.join("b.html"), "<h1 id=\"x\">").unwrap();
        let text = ["b.html", "b.html#x", "https://no.example/", "b.html#y", "../examples/c", "#z"]
            .map(|link| format!("<a href=\"{link}\">"));
        fs::write(&page, text.concat()).unwrap();
        let dead = super::dead_links(&page).unwrap();
        let links: Vec<&str> = dead.iter().map(|line| line.split(' ').nth(1).unwrap()).collect();
        assert_eq!(links, ["b.html#y", "../examples/c", "#z"]);
        fs::remove_dir_all(book).unwrap();
    }

    #[test]
    fn base64_is_read() {
        for (text, bytes) in [("bWl6emVu", "mizzen"), ("YQ==", "a"), ("YWI=", "ab"), ("Pz8/", "???")] {
            assert_eq!(super::base64(text), bytes.as_bytes());
        }
    }
}
