//! From an asked request to its answer's choices, whatever the API.

use futures::future::try_join_all;
use serde_json::Value;

use super::App;
use super::ask::Ask;
use super::choice::{Choice, End, Part};
use super::errors::Fault;
use super::totals::Totals;

/// Give all choices of all prompts to the engine, prompt by prompt.
pub(crate) async fn begin(app: &App, ask: &mut Ask, prompts: &[Vec<u32>]) -> Result<Vec<Choice>, Fault> {
    app.awake()?;
    ask.meet(app).await?;
    let ask = &*ask;
    let each = prompts.iter().flat_map(|prompt| (0..ask.choices).map(move |choice| (prompt, choice)));
    each.map(|(prompt, choice)| {
        let ticket = app.driver.submit(ask.request(app, prompt, choice)?)?;
        Ok(Choice::new(ticket, app.codec.clone(), ask.stops.clone()))
    })
    .collect()
}

pub(crate) struct Answer {
    pub(crate) choices: Vec<(Part, End)>,
    pub(crate) totals: Totals,
    /// `kv_transfer_params`, or null.
    pub(crate) params: Value,
}

pub(crate) async fn whole(app: &App, ask: &Ask, choices: Vec<Choice>) -> Result<Answer, Fault> {
    let choices = try_join_all(choices.into_iter().map(Choice::whole)).await?;
    let mut totals = Totals::new(ask.remote_cached);
    for (index, (_, end)) in (0u32..).zip(&choices) {
        totals.add(index % ask.choices, end);
    }
    let handoff = choices.iter().find_map(|(_, end)| end.finish.handoff.as_ref());
    let params = app.handing.hand(&ask.leg.part, (handoff, &app.identity)).await?;
    Ok(Answer { choices, totals, params })
}
