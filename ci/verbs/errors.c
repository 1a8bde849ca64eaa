// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Work requests that fail: the status on each side, the states, the events; and that what was after
 * them is flushed.
 */
#include "verbs-test.h"

/* What the error at the responder does to it. */
static void responder_error(struct pair *p, enum ibv_event_type event)
{
	struct ibv_async_event got = wait_event_at(__FILE__, __LINE__, ctx, event);

	CHECK(got.element.qp == p->qp[1]);
	wait_state(p->qp[0], IBV_QPS_ERR);
	wait_state(p->qp[1], IBV_QPS_ERR);
	no_event();
}

/* An error of the requester alone: its queue pair is in ERR, the other hears nothing. */
static void requester_error(struct pair *p)
{
	wait_state(p->qp[0], IBV_QPS_ERR);
	EQ(state_of(p->qp[1]), IBV_QPS_RTS);
	no_event();
}

TEST(err_loc_len_too_long_message)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory = pages(4096);
	struct ibv_mr *mr = MAKE(ibv_reg_mr(p.pd[0], memory, 4096, LOCAL));
	struct ibv_sge list[4];

	/* More than the port's longest message. The lkeys are good, the ranges need not be. */
	if (port.max_msg_sz > 0x80000000u)
		skip("the longest message cannot be told");
	for (int i = 0; i < 4; i++)
		list[i] = (struct ibv_sge){ (uintptr_t)memory, 0x7fffffff, mr->lkey };
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = list, .num_sge = 4, .to = &p.mr[1]);
	expect_error(p.cq[0], 1, LOC_LEN_ERR);
	requester_error(&p);
}

TEST(err_loc_len_receive_too_short)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	fill(p.mr[0].p, 100, 1);
	RECV(p.qp[1], 10, &p.mr[1], 0, 99);
	RECV(p.qp[1], 11, &p.mr[1], 0, 4096);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 100);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &p.mr[0], .length = 10);
	expect_error(p.cq[0], 1, REM_INV_REQ_ERR);
	expect_error(p.cq[0], 2, WR_FLUSH_ERR);
	expect_error(p.cq[1], 10, LOC_LEN_ERR);
	expect_error(p.cq[1], 11, WR_FLUSH_ERR);
	CHECK(all_bytes(p.mr[1].p + 99, 1000, 0));
	wait_state(p.qp[0], IBV_QPS_ERR);
	wait_state(p.qp[1], IBV_QPS_ERR);
}

/*
 * More scatter/gather entries than the queue has, and other things that posting may refuse itself.
 */
TEST(err_too_many_sges)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .sge = 2);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_sge list[64];
	int error;

	OK(ibv_query_qp(p.qp[0], &attr, IBV_QP_CAP, &init));
	CHECK(init.cap.max_send_sge >= 2 && init.cap.max_send_sge < 64);
	for (int i = 0; i < 64; i++)
		list[i] = sge(&p.mr[0], i, 1);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = list, .num_sge = init.cap.max_send_sge, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	error = post(p.qp[0], &(struct op){ .opcode = IBV_WR_RDMA_WRITE, .id = 2, .list = list,
					    .num_sge = init.cap.max_send_sge + 1, .to = &p.mr[1] });
	/* mlx5 says ENOMEM, rxe EINVAL. */
	CHECK(error == EINVAL || error == ENOMEM);
	FAILS(EINVAL, post(p.qp[0], &(struct op){ .opcode = 99, .id = 3 }));
}

TEST(err_loc_qp_op_rd_atomic)
{
	struct conn how = conn(0);

	/* No READ may be outstanding. */
	how.rd_atomic = 0;
	struct pair p = PAIR(.type = IBV_QPT_RC, .conn = &how);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_error(p.cq[0], 1, LOC_QP_OP_ERR);
	requester_error(&p);
}

TEST(err_loc_prot_unknown_lkey)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_sge list = { (uintptr_t)p.mr[0].p, 8, p.mr[0].mr->lkey ^ 0xf00 };

	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .list = &list, .num_sge = 1, .to = &p.mr[1], .to_offset = 64);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 4, .from = &p.mr[0], .length = 8, .to = &p.mr[1], .unsignaled = true);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	expect_error(p.cq[0], 2, LOC_PROT_ERR);
	expect_error(p.cq[0], 3, WR_FLUSH_ERR);
	/* What is flushed completes, signaled or not. */
	expect_error(p.cq[0], 4, WR_FLUSH_ERR);
	requester_error(&p);
}

TEST(err_loc_prot_of_other_pd)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[1], .length = 8, .to = &p.mr[1]);
	expect_error(p.cq[0], 1, LOC_PROT_ERR);
	requester_error(&p);
}

TEST(err_loc_prot_out_of_range)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .offset = 16384 - 7, .length = 8);
	expect_error(p.cq[0], 1, LOC_PROT_ERR);
	requester_error(&p);
}

TEST(err_loc_prot_before_start)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_sge list = { (uintptr_t)p.mr[0].p - 1, 8, p.mr[0].mr->lkey };

	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = &list, .num_sge = 1, .to = &p.mr[1]);
	expect_error(p.cq[0], 1, LOC_PROT_ERR);
}

TEST(err_loc_prot_wrapping_range)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_sge list = { UINT64_MAX - 3, 8, p.mr[0].mr->lkey };

	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = &list, .num_sge = 1, .to = &p.mr[1]);
	expect_error(p.cq[0], 1, LOC_PROT_ERR);
}

/* What a READ brings goes to memory that may be written. */
TEST(err_loc_prot_read_into_read_only)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct region only = region(p.pd[0], 4096, IBV_ACCESS_REMOTE_READ);
	struct ibv_wc wc;

	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &only, .length = 8, .to = &p.mr[1]);
	wc = wait_wc(p.cq[0]);
	/* A local protection or a local access error: devices differ. */
	CHECK(wc.status == IBV_WC_LOC_PROT_ERR || wc.status == IBV_WC_LOC_ACCESS_ERR);
	wait_state(p.qp[0], IBV_QPS_ERR);
	CHECK(all_bytes(only.p, 8, 0));
}

/*
 * A receive with a bad key: an error of the receiver, which the sender hears of as a remote
 * operation error.
 */
TEST(err_rem_op_bad_receive_key)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	/* Of the other domain. */
	RECV(p.qp[1], 10, &p.mr[0], 0, 100);
	RECV(p.qp[1], 11, &p.mr[1], 0, 100);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .offset = 4096, .length = 100);
	expect_error(p.cq[0], 1, REM_OP_ERR);
	expect_error(p.cq[1], 10, LOC_PROT_ERR);
	expect_error(p.cq[1], 11, WR_FLUSH_ERR);
	wait_state(p.qp[0], IBV_QPS_ERR);
	wait_state(p.qp[1], IBV_QPS_ERR);
}

TEST(err_rem_op_receive_into_read_only)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct region only = region(p.pd[1], 4096, IBV_ACCESS_REMOTE_READ);
	struct ibv_wc wc;

	RECV(p.qp[1], 10, &only, 0, 100);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 100);
	expect_error(p.cq[0], 1, REM_OP_ERR);
	wc = wait_wc(p.cq[1]);
	EQ(wc.wr_id, 10);
	CHECK(wc.status == IBV_WC_LOC_PROT_ERR || wc.status == IBV_WC_LOC_ACCESS_ERR);
}

TEST(err_rem_access_unknown_rkey)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	RECV(p.qp[1], 10, &p.mr[1], 0, 100);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .addr = (uintptr_t)p.mr[1].p,
	     .rkey = p.mr[1].mr->rkey ^ 1);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &p.mr[0], .length = 8);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	expect_error(p.cq[0], 2, WR_FLUSH_ERR);
	expect_error(p.cq[1], 10, WR_FLUSH_ERR);
	responder_error(&p, IBV_EVENT_QP_ACCESS_ERR);
}

TEST(err_rem_access_of_other_pd)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[0], .to_offset = 64);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	responder_error(&p, IBV_EVENT_QP_ACCESS_ERR);
}

TEST(err_rem_access_out_of_range)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	fill(p.mr[0].p, 100, 1);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 100, .to = &p.mr[1],
	     .to_offset = 16384 - 99);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	CHECK(all_bytes(p.mr[1].p, 16384, 0));
	responder_error(&p, IBV_EVENT_QP_ACCESS_ERR);
}

/* Each right is needed, of the region and of the queue pair. */
static void without(int right, enum ibv_wr_opcode opcode, bool of_qp)
{
	struct conn how = conn(0);

	if (of_qp)
		how.access &= ~right;
	struct pair p = PAIR(.type = IBV_QPT_RC, .mr_access = of_qp ? ALL : ALL & ~right, .conn = &how);
	struct region from = region(p.pd[0], 4096, ALL);

	POST(p.qp[0], .opcode = opcode, .id = 1, .from = &from, .length = 8, .to = &p.mr[1]);
	/*
	 * To a queue pair that is not set up for it the request is invalid; a key that does not grant it
	 * is a violation.
	 */
	if (of_qp)
		expect_error(p.cq[0], 1, REM_INV_REQ_ERR);
	else
		expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	responder_error(&p, of_qp ? IBV_EVENT_QP_REQ_ERR : IBV_EVENT_QP_ACCESS_ERR);
}

TEST(err_rem_access_write_right)
{
	without(IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_WRITE, false);
	without(IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_WRITE, true);
}

TEST(err_rem_access_read_right)
{
	without(IBV_ACCESS_REMOTE_READ, IBV_WR_RDMA_READ, false);
	without(IBV_ACCESS_REMOTE_READ, IBV_WR_RDMA_READ, true);
}

TEST(err_rem_access_atomic_right)
{
	without(IBV_ACCESS_REMOTE_ATOMIC, IBV_WR_ATOMIC_FETCH_AND_ADD, false);
	without(IBV_ACCESS_REMOTE_ATOMIC, IBV_WR_ATOMIC_CMP_AND_SWP, true);
}

TEST(err_rem_inv_req_atomic_alignment)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
	     .to_offset = 4, .compare_add = 1);
	expect_error(p.cq[0], 1, REM_INV_REQ_ERR);
	CHECK(all_bytes(p.mr[1].p, 16, 0));
	responder_error(&p, IBV_EVENT_QP_REQ_ERR);
}

TEST(err_rem_inv_req_no_dest_rd_atomic)
{
	struct conn how = conn(0);

	how.dest_rd_atomic = 0;
	struct pair p = PAIR(.type = IBV_QPT_RC, .conn = &how);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_error(p.cq[0], 1, REM_INV_REQ_ERR);
	responder_error(&p, IBV_EVENT_QP_REQ_ERR);
}

/* An atomic operation brings eight bytes. */
TEST(err_atomic_length)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	int error = post(p.qp[0], &(struct op){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 1, .from = &p.mr[0], .length = 16,
						.to = &p.mr[1], .compare_add = 1 });
	struct ibv_wc wc;

	if (error) {
		EQ(error, EINVAL);
		return;
	}
	wc = wait_wc(p.cq[0]);
	CHECK(wc.status == IBV_WC_LOC_LEN_ERR || wc.status == IBV_WC_LOC_QP_OP_ERR);
	EQ(*(uint64_t *)p.mr[1].p, 0);
}

/* Nobody answers: the number of tries and the time between them hold. */
TEST(err_retry_exc)
{
	struct conn how = conn(0);

	how.timeout = 14; /* 67 ms */
	how.retry_cnt = 3;
	struct pair p = PAIR(.type = IBV_QPT_RC, .conn = &how);
	OK(ibv_destroy_qp(p.qp[1]));
	uint64_t start = now_ns();
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_error(p.cq[0], 1, RETRY_EXC_ERR);
	uint64_t ms = (now_ns() - start) / 1000000;
	expect_error(p.cq[0], 2, WR_FLUSH_ERR);
	/* Four times at least 67 ms; up to four times as long is allowed by InfiniBand. */
	if (ms < 260 || ms > 4 * 4 * 68 + TIMEOUT_MS / 2)
		fail("after %llu ms", (unsigned long long)ms);
	wait_state(p.qp[0], IBV_QPS_ERR);
	no_event();
}

/* A peer that is not connected to us is none. */
TEST(err_retry_exc_not_connected)
{
	struct conn how = conn(0);

	how.timeout = 12;
	how.retry_cnt = 1;
	struct pair p = PAIR(.type = IBV_QPT_RC, .conn = &how), q = PAIR(.type = IBV_QPT_RC);
	struct conn to = how;
	set_state(p.qp[0], IBV_QPS_RESET);
	to.qpn = q.qp[1]->qp_num;
	connect_qp(p.qp[0], &to);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &q.mr[1]);
	expect_error(p.cq[0], 1, RETRY_EXC_ERR);
	CHECK(all_bytes(q.mr[1].p, 8, 0));
}

TEST(err_rnr_retry_exc)
{
	struct conn how = conn(0);

	how.min_rnr_timer = 20; /* 10.24 ms */
	how.rnr_retry = 3;
	struct pair p = PAIR(.type = IBV_QPT_RC, .conn = &how);
	uint64_t start = now_ns();
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 8);
	expect_error(p.cq[0], 1, RNR_RETRY_EXC_ERR);
	uint64_t ms = (now_ns() - start) / 1000000;
	if (ms < 30 || ms > TIMEOUT_MS / 2)
		fail("after %llu ms", (unsigned long long)ms);
	wait_state(p.qp[0], IBV_QPS_ERR);
	EQ(state_of(p.qp[1]), IBV_QPS_RTS);
	no_event();
}

/* With seven there is no limit: a receive that comes late is in time. */
TEST(err_rnr_without_limit)
{
	struct conn how = conn(0);

	how.min_rnr_timer = 1;
	struct pair p = PAIR(.type = IBV_QPT_RC, .conn = &how);
	fill(p.mr[0].p, 100, 1);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 100);
	sleep_ms(300);
	expect_none(p.cq[0]);
	RECV(p.qp[1], 10, &p.mr[1], 0, 100);
	expect_ok(p.cq[0], 1, SEND);
	expect_ok(p.cq[1], 10, RECV);
	CHECK(filled(p.mr[1].p, 100, 1));
}

TEST(err_flush_by_state)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	for (int i = 0; i < 4; i++)
		RECV(p.qp[0], 10 + i, &p.mr[0], 0, 64);
	/* It waits for a receive. */
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 8);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	set_state(p.qp[0], IBV_QPS_ERR);
	bool sends = false;
	int recv = 0, send = 0;
	for (int i = 0; i < 6; i++) {
		struct ibv_wc wc = wait_wc(p.cq[0]);

		EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		EQ(wc.qp_num, p.qp[0]->qp_num);
		sends = wc.wr_id < 10;
		/* Each queue in its order. */
		EQ(wc.wr_id, sends ? 1 + send++ : 10 + recv++);
	}
	EQ(recv, 4);
	EQ(send, 2);
	expect_none(p.cq[0]);
	no_event();
}

/* A reset forgets: no completions of what was before. */
TEST(err_reset_forgets)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct conn usual = conn(0);

	for (int i = 0; i < 4; i++)
		RECV(p.qp[1], 10 + i, &p.mr[1], 0, 64);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 8);
	expect_ok(p.cq[0], 1, SEND);
	for (int i = 0; i < 2; i++)
		set_state(p.qp[i], IBV_QPS_RESET);
	expect_none(p.cq[1]);
	connect_pair(&p, &usual);
	RECV(p.qp[1], 20, &p.mr[1], 0, 64);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &p.mr[0], .length = 8);
	expect_ok(p.cq[0], 2, SEND);
	expect_ok(p.cq[1], 20, RECV);
}

/* An error of one queue pair leaves those that share its completion queue alone. */
TEST(err_harms_no_other)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *third = make_qp(p.pd[0], p.cq[0], &with), *fourth = make_qp(p.pd[1], p.cq[1], &with);
	struct conn to = conn(fourth->qp_num);

	connect_qp(third, &to);
	to = conn(third->qp_num);
	connect_qp(fourth, &to);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .addr = 0, .rkey = 0);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	for (uint64_t i = 0; i < 10; i++) {
		POST(third, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
		EQ(expect_ok(p.cq[0], i, RDMA_WRITE).qp_num, third->qp_num);
	}
	EQ(state_of(third), IBV_QPS_RTS);
	EQ(state_of(fourth), IBV_QPS_RTS);
}

/* Addresses whose range would pass the end of all addresses. */
TEST(err_rem_access_wrapping_range)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 4096, .addr = UINT64_MAX - 100,
	     .rkey = p.mr[1].mr->rkey);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	responder_error(&p, IBV_EVENT_QP_ACCESS_ERR);
}

/*
 * Keys that nobody was given open nothing: neighbours of a good one, small ones, and some of
 * chance.
 */
TEST(err_guessed_keys)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct conn usual = conn(0);
	uint32_t good = p.mr[1].mr->rkey, guess = 12345;

	for (int i = 0; i < 40; i++) {
		struct ibv_async_event event;
		uint32_t key = i < 16 ? good + i - 8 : i < 20 ? (uint32_t)i - 16 : guess;

		guess = guess * 1664525 + 1013904223;
		if (key == good || key == p.mr[0].mr->rkey)
			continue;
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .addr = (uintptr_t)p.mr[1].p,
		     .rkey = key);
		expect_error(p.cq[0], i, REM_ACCESS_ERR);
		OK(ibv_get_async_event(ctx, &event));
		EQ(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
		ibv_ack_async_event(&event);
		for (int j = 0; j < 2; j++)
			set_state(p.qp[j], IBV_QPS_RESET);
		connect_pair(&p, &usual);
	}
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 99, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_ok(p.cq[0], 99, RDMA_WRITE);
}
