// The official `openai` package for Node.
const OpenAI = require('openai');

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0, timeout: 120_000 });
const messages = [
  { role: 'system', content: 'You help travellers.' },
  { role: 'user', content: 'Which gate is it?' },
];
const chat = { model: 'tiny', messages, max_tokens: 24, temperature: 0 };
const weather = {
  type: 'function',
  function: {
    name: 'weather',
    parameters: {
      type: 'object', additionalProperties: false, required: ['city'], properties: { city: { enum: ['Oslo', 'Lima', 'Pune'] } },
    },
  },
};
const forced = { max_tokens: 60, tools: [weather], tool_choice: { type: 'function', function: { name: 'weather' } } };
const found = {};

async function streamed(more) {
  const stream = client.chat.completions.stream({ ...chat, stream_options: { include_usage: true }, ...more });
  let text = '';
  stream.on('content', (delta) => { text += delta; });
  return [await stream.finalChatCompletion(), text];
}

async function refused(more) {
  try {
    await client.chat.completions.create({ ...chat, ...more });
    return 'nothing';
  } catch (error) {
    return [error.constructor.name, error.status];
  }
}

async function main() {
  found.models = (await client.models.list()).data.map((model) => model.id);
  found.chat = await client.chat.completions.create(chat);
  found['chat, streamed'] = await streamed({});
  found['a tool'] = await client.chat.completions.create({ ...chat, ...forced });
  found['a tool, streamed'] = await streamed(forced);
  const text = { model: 'tiny', prompt: 'The flight leaves at', max_tokens: 20, temperature: 0 };
  found.completion = await client.completions.create(text);
  let joined = '';
  for await (const chunk of await client.completions.create({ ...text, stream: true })) joined += chunk.choices[0]?.text ?? '';
  found['completion, streamed'] = joined;
  const response = { model: 'tiny', input: 'Which gate is it?', max_output_tokens: 20, temperature: 0 };
  found.response = await client.responses.create(response);
  const events = client.responses.stream(response);
  let said = '';
  events.on('response.output_text.delta', (event) => { said += event.delta; });
  found['response, streamed'] = [await events.finalResponse(), said];
  found['an unknown model'] = await refused({ model: 'huge' });
  found['a wrong type'] = await refused({ temperature: 'hot' });
  process.stdout.write(JSON.stringify(found));
}

main();
