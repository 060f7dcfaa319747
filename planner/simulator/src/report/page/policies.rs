//! Style of each policy, the same in every plot: colour and dash together distinguish the policies.

use std::fmt::Write as _;

use crate::policies::{PolicyKind, all_policies};

const COLOURS: usize = 7;
const DASHES: [&str; 3] = ["none", "7 4", "2 3"];

/// Returns the CSS class of a policy's marks.
pub(super) fn class(policy: &str) -> String {
    match policy.parse::<PolicyKind>() {
        Ok(PolicyKind::OwnerServe) => format!("own s-{policy}"),
        Ok(PolicyKind::PooledMemory | PolicyKind::Oracle) => format!("bound s-{policy}"),
        _ => format!("s-{policy}"),
    }
}

/// Returns the CSS rules of these policies: their style, and hiding them while their checkbox is off.
pub(super) fn rules(policies: &[&str]) -> String {
    let mut css = String::new();
    for policy in policies {
        let (colour, dash, width) = line_style(policy);
        let of = format!(".s-{policy}");
        let _ = write!(
            css,
            "{of} .series,{of} .whisker{{stroke:{colour};stroke-width:{width}}}{of} .series{{stroke-dasharray:{dash}}}\
             {of} .dot{{fill:{colour}}}body:has(#show-{policy}:not(:checked)) g{of}{{display:none}}"
        );
    }
    css
}

fn line_style(policy: &str) -> (String, &'static str, f64) {
    let place = all_policies().position(|kind| kind.as_str() == policy);
    let place = place.unwrap_or_default();
    match policy.parse::<PolicyKind>() {
        Ok(PolicyKind::OwnerServe) => ("var(--own)".into(), "none", 3.0),
        Ok(PolicyKind::PooledMemory) => ("var(--bound)".into(), "7 4", 1.5),
        Ok(PolicyKind::Oracle) => ("var(--bound)".into(), "2 3", 1.5),
        _ => (format!("var(--c{})", place % COLOURS), DASHES[place / COLOURS % DASHES.len()], 1.75),
    }
}

/// Returns a checkbox for each policy, with its line style: selects what line plots show, and serves as their legend.
pub(super) fn policy_checkboxes(policies: &[&str]) -> String {
    let mut html = "<fieldset><legend>Policies shown in plots of lines</legend><div class=\"legend\">".to_owned();
    for policy in policies {
        let id = format!("show-{policy}");
        let _ = write!(html, "<label><input type=\"checkbox\" id=\"{id}\" checked>{}{policy}</label>", swatch(policy));
    }
    html + "</div></fieldset>"
}

/// Returns the legend of a plot.
pub(super) fn legend(policies: &[&str]) -> String {
    let items: String = policies.iter().map(|policy| format!("<li>{}{policy}</li>", swatch(policy))).collect();
    format!("<ul class=\"legend\" aria-hidden=\"true\">{items}</ul>")
}

fn swatch(policy: &str) -> String {
    let class = class(policy);
    format!(
        "<svg viewBox=\"0 0 34 12\" aria-hidden=\"true\" class=\"{class}\"><path class=\"series\" d=\"M1 6H33\"/></svg>"
    )
}
